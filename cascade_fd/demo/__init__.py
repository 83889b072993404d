"""The demo: one long prompt, many different questions, a real model, and plain attention as the judge."""
