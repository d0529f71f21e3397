"""Kin of DiLoCo, for pre-training over sites: silos go on from weights of their own."""
