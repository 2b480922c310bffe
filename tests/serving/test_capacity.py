"""How many pages an engine's cache has, by the memory that a machine and a container have left."""

from pathlib import Path

import pytest

from saccade.serving.capacity import available_memory


@pytest.mark.parametrize(
    ("files", "bytes_left"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   7 kB\n"}, 7 << 10),
        ({"proc/meminfo": "MemTotal: 9 kB\n"}, None),
        ({"proc/meminfo": "MemAvailable: many kB\n"}, None),
        ({"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}, None),
        ({"sys/fs/cgroup/memory.max": "9\n", "sys/fs/cgroup/memory.current": "5\n"}, 4),
        ({"sys/fs/cgroup/memory.max": "5\n", "sys/fs/cgroup/memory.current": "9\n"}, 0),
        (
            {
                "proc/meminfo": "MemAvailable: 1 kB\n", "sys/fs/cgroup/memory.max": "4096\n",
                "sys/fs/cgroup/memory.current": "0\n",
            },
            1 << 10,
        ),
    ],
)  # fmt: skip
def test_what_the_system_and_a_container_have_left(
    tmp_path: Path, files: dict[str, str], bytes_left: int | None
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    assert available_memory(tmp_path) == bytes_left
