"""The demo: train a small byte model with Saccade, check it, let it write, and measure."""
