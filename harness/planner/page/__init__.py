"""The planner as one HTML file that computes plans in a browser.

The planner's own functions run there, translated to JavaScript whenever a page is written. In the order in which they
build on each other:

- `expressions.py`, `calls.py`, `statements.py`: a subset of Python as JavaScript; `parts/runtime.js`: what that needs
- `program.py`: the functions that a page calls, and all that these need
- `content.py`: which functions these are, and the files that they read
- `write.py`: the page, of `parts/`: its form and drawings (`page.html`, `page.css`, `page.js`, `draw.js`), well-known
  models, and the tables of `docs/predictions.md`
"""
