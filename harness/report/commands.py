"""The verb `ds-harness report`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from harness.atomic import write_output
from harness.errors import UserError
from harness.planner.hardware import load_hardware, names
from harness.report.page import charts_of, page
from harness.report.png import write_pngs
from harness.report.run_files import read_runs
from harness.verb_parser import VerbParser, name_or_path, path_argument

EXAMPLE = """example:
  ds-harness report runs/mine
  ds-harness report runs/first runs/second --output compared.html --png pictures"""


def report(argv: Sequence[str]) -> int:
    """Write the report of one or several runs and return the exit code; UserError if it cannot be written."""
    description = "Show runs in one HTML file, which needs no network: curves, the step of a profiled run, memory."
    parser = VerbParser("report", description, EXAMPLE)
    parser.add_argument("run_dirs", nargs="+", type=path_argument, metavar="RUN_DIR", help="the --output_dir of a run")
    parser.add_argument(
        "--output", type=path_argument, metavar="FILE", help="default: report.html in the first RUN_DIR"
    )
    parser.add_argument("--png", type=path_argument, metavar="FOLDER", help="write the charts as PNG files, too")
    devices = f"{', '.join(names())}, or the path of a device file"
    parser.add_argument("--hardware", type=name_or_path, help=f"predict the time of a step on it: {devices}")
    args = parser.parse_args(argv)
    runs = read_runs(args.run_dirs)
    for problem in filter(None, (run.problem for run in runs)):
        print(f"warning: {problem}", file=sys.stderr)
    plotly = installed("plotly.offline").get_plotlyjs()
    curve_charts, charts = charts_of(runs, load_hardware(args.hardware) if args.hardware else None)
    target = args.output or args.run_dirs[0] / "report.html"
    written = [target]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_output(target, page(curve_charts, charts, plotly))
        if args.png is not None:
            written += write_pngs(args.png, curve_charts, charts, _pyplot())
    except OSError as error:
        raise UserError(f"{error.filename or target}: cannot be written: {error.strerror}") from error
    print("\n".join(map(str, written)))
    return 0


def _pyplot() -> ModuleType:
    """Return matplotlib's pyplot, set to draw to files only, as there may be no display."""
    installed("matplotlib").use("agg")
    return installed("matplotlib.pyplot")


def installed(module: str) -> ModuleType:
    """Return a module of the extra `report`. Raises UserError if its package is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f"{package} is not installed: pip install 'ds-harness[report]'") from error
