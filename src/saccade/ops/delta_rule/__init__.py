"""The gated delta rule: linear attention whose state forgets what a key held before."""
