"""Pipeline stages evened out while a run lives: their times are measured, and layers move between them."""
