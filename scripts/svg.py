"""A picture as SVG text: boxes, lines and words on a white ground, in the colours of the docs."""

from collections.abc import Sequence
from html import escape

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")
PALE = ("#dbe3f0", "#f8e6db", "#ddeee1", "#f3dbdc", "#e6e3f0", "#e9e4df", "#f8e8f3", "#e8e8e8")
INK, GREY, RULE = "#222222", "#666666", "#dddddd"


class Drawing:
    """Collect shapes; `text()` is the picture. All lengths are in pixels, y points down."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "none", radius: float = 3
    ) -> None:
        """Add a rectangle."""
        self._shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Add a line of text whose baseline is at `y`; with `mono` each character is 0.6 of `size` wide."""
        style = ' font-weight="600"' if bold else ""
        if mono:
            style += f' font-family="monospace" textLength="{0.6 * size * len(text):.1f}"'
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{style}>'
            f"{escape(text)}</text>"
        )

    def line(self, points: Sequence[tuple[float, float]], stroke: str, *, width: float = 1) -> None:
        """Add a line through `points`."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"/>')

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        """Add a filled circle."""
        self._shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}"/>')

    def text(self) -> str:
        """Return the SVG document."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img" font-family="system-ui, sans-serif">'
        )
        ground = f'<rect width="{self.width:g}" height="{self.height:g}" fill="#ffffff"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", ground, *self._shapes, "</svg>", ""])
