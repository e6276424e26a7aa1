"""`ds-harness cluster`: write the file by which a cluster starts `ds-harness launch` on its hosts. No torch."""
