"""The operations. ``attend`` runs a plan; the one-shot forms make one; merges need none."""
