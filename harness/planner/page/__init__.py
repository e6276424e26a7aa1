"""The planner in a browser: one HTML file that contains the planner's Python and runs it in Pyodide."""
