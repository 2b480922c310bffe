"""The command `saccade tune`: options, checked and handed to what times.

Nothing heavy is imported until something is timed.
"""

from __future__ import annotations

from typing import Annotated

import typer

HEAD_DIM = typer.Option("--head-dim", "-d", help="Channels; several times for several tables.")
LENGTH = typer.Option("--length", "-l", min=1, help="Query and key rows of a sequence.")
BATCH = typer.Option("--batch", min=1, help="Sequences.")
HEADS = typer.Option("--heads", min=1, help="Query heads.")
KV_HEADS = typer.Option("--kv-heads", min=1, help="Key and value heads; as many by default.")
DTYPE = typer.Option("--dtype", help="bf16, fp16 or fp32.")
MASK = typer.Option("--mask", help="none, causal, window, documents, blocks, dense; several times.")
WHICH = typer.Option("--which", "-w", help="Kernels: forward, backward_keys, ...; with commas.")
LIMIT = typer.Option("--limit", min=0, help="Seconds after which the last turns of a kernel end.")
JOBS = typer.Option("--jobs", "-j", min=1, help="Compilers at a time; by default one a core.")
SAVE = typer.Option("--save", help="Use the winners from now on: write them to your own table.")

KERNELS = ("forward", "backward_keys", "backward_queries", "backward_shared")


def tune(
    head_dim: Annotated[list[int] | None, HEAD_DIM] = None,
    length: Annotated[int, LENGTH] = 4096,
    batch: Annotated[int, BATCH] = 4,
    heads: Annotated[int, HEADS] = 16,
    kv_heads: Annotated[int | None, KV_HEADS] = None,
    dtype: Annotated[str, DTYPE] = "bf16",
    mask: Annotated[list[str] | None, MASK] = None,
    which: Annotated[list[str] | None, WHICH] = None,
    limit: Annotated[float, LIMIT] = 20.0,
    jobs: Annotated[int | None, JOBS] = None,
    save: Annotated[bool, SAVE] = False,
) -> None:
    """Find the fastest tile sizes for this machine's GPU.

    Candidates are compiled first, looked at once, and the fastest then take
    turns. Only the kernel itself is timed. Without --save nothing changes.

    [bold]Examples[/bold]

      saccade tune                          [dim]width 128, without a mask and causal[/dim]
      saccade tune -d 64 --mask causal --save
      saccade tune -w forward -d 128 --length 16384 --batch 1
      saccade tune -w backward_keys,backward_queries --mask window --limit 60
    """
    from saccade.kernel_check import session

    def work() -> None:
        session.triton_version()  # or the next line would fail with less to say
        from saccade.kernel_check import tuner

        names = [part.strip() for name in which or KERNELS for part in name.split(",")]
        found = tuner.calls_of(
            head_dim or [128], [length], dtype, mask or ["none", "causal"], batch, heads, kv_heads
        )
        tuner.tune([(name, call) for call in found for name in names], limit, jobs, save)

    session.or_exit("tune", work)
