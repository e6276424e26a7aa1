"""`ds-harness cluster`: write the job file with which a cluster starts `ds-harness launch` on its hosts. No torch."""
