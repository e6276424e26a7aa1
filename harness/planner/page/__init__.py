"""The planner in a browser: one HTML file that carries the planner's Python and runs it in Pyodide."""
