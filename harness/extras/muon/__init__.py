"""Muon: momentum with orthogonalised updates for matrices, gathered whole from the parts that ZeRO hands it."""
