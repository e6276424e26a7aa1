"""Pictures of a run (`ds-harness report`): its files, what to show of them, drawn as a page or PNGs. No torch."""
