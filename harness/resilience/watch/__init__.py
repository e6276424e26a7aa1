"""Watch the ranks while they train: one that is dead, hangs or is slower than its peers is named by the others."""
