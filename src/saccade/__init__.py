"""Saccade: exact attention for PyTorch, for training and serving, in Python."""

from saccade import masks as masks
from saccade import scores as scores
from saccade import testing as testing
from saccade.attention import attention as attention
from saccade.attention import attention_packed as attention_packed
from saccade.attention_paged import attention_paged as attention_paged
from saccade.cache.move import move_pages as move_pages
from saccade.cache.paged_cache import PagedCache as PagedCache
from saccade.cache.pool import OutOfPages as OutOfPages
from saccade.cache.write import cache_write as cache_write
from saccade.explain import explain as explain
from saccade.merge import merge as merge
from saccade.problem import Config as Config

__version__ = "0.1.0"
__all__ = [
    "Config",
    "OutOfPages",
    "PagedCache",
    "attention",
    "attention_packed",
    "attention_paged",
    "cache_write",
    "explain",
    "masks",
    "merge",
    "move_pages",
    "scores",
    "testing",
]
