"""Draw pictures of a run (`ds-harness report`) from its files, as an HTML page or as PNGs. No torch."""
