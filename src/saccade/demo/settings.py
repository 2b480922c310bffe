"""Settings: how much the demo does of everything, quick or in full."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DemoModelShape:
    """The sizes of the byte model.

    Attributes:
        width: channels of the residual stream.
        query_heads: heads that ask.
        kv_heads: heads that answer; each serves query_heads / kv_heads of those that ask.
        hidden: channels inside each MLP.
        windows: for each layer, how many bytes back it sees; None means all of them.
        context: the longest text that it is trained on, in bytes.
    """

    width: int = 192
    query_heads: int = 6
    kv_heads: int = 2
    hidden: int = 384
    windows: tuple[int | None, ...] = (64, None, None)
    context: int = 256

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.width // self.query_heads


@dataclass(frozen=True)
class DemoSettings:
    """What one run of the demo does, within its budget of wall-clock time.

    Attributes:
        total_seconds: by then the comparison is done; lengths that would take longer are left out.
        training_seconds: how long it trains where no number of steps is asked for.
        batch: texts in one training step.
        learning_rate: the highest one, after the warm-up.
        held_out_bytes: how many unseen bytes are judged.
        new_bytes: how long the generated text is.
        lengths: sequence lengths of the comparison.
        window_lengths: those of them that are also compared under a sliding window.
        rounds: measurements of each time, interleaved.
    """

    total_seconds: float
    training_seconds: float
    held_out_bytes: int
    lengths: tuple[int, ...]
    window_lengths: tuple[int, ...]
    rounds: int
    batch: int = 2
    learning_rate: float = 3e-3
    new_bytes: int = 200
    shape: DemoModelShape = field(default_factory=DemoModelShape)


QUICK = DemoSettings(
    total_seconds=34,
    training_seconds=13,
    held_out_bytes=40_000,
    lengths=(1024, 2048),
    window_lengths=(1024, 2048),
    rounds=3,
)
FULL = DemoSettings(
    batch=4,
    total_seconds=228,
    training_seconds=90,
    held_out_bytes=200_000,
    lengths=(1024, 2048, 4096, 8192, 16384),
    window_lengths=(1024, 2048, 4096, 8192),
    rounds=3,
)
