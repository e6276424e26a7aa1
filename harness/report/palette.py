"""Colours that people with any colour vision tell apart, on white and on near-black.

Source: Okabe and Ito 2008, Color Universal Design; blue and vermilion are a little lighter here, for dark pages.
"""

from __future__ import annotations

BLUE, ORANGE, GREEN, PINK, YELLOW, SKY = "#2b83c6", "#e0712c", "#009e73", "#cc79a7", "#e6b91e", "#56b4e9"
GREY, PALE = "#8a8f98", "rgba(138,143,152,0.28)"
RUNS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY)
DARKER = 0.62  # of each channel

OF_KIND = {
    "forward": BLUE,
    "backward": ORANGE,
    "recompute": YELLOW,
    "send": SKY,
    "receive": GREEN,
    "reduce": PINK,
    "step": YELLOW,
    "data": GREY,
    "wait": PALE,
}
OF_MEMORY = {"parameters": BLUE, "gradients": ORANGE, "optimizer": GREEN, "activations": PINK, "other": PALE}
OF_MARK = {"checkpoint": GREEN, "restart": ORANGE, "rollback": PINK}


def darker(color: str, steps: int) -> str:
    """Return a colour, given as #rrggbb, so many steps darker: white text stands out from all of them."""
    channels = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(channel * DARKER**steps):02x}" for channel in channels)


def of_run(number: int) -> str:
    """Return the colour of a run by its number."""
    return RUNS[number % len(RUNS)]
