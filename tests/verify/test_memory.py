from __future__ import annotations

from pathlib import Path

from flashnorm.verify.memory import available_bytes

GIB = 2**30


def _control_group(folder: Path, limit: str) -> Path:
    folder.mkdir()
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{3 * GIB}\n")
    (folder / "memory.stat").write_text(
        f"anon {GIB}\nfile {2 * GIB}\nshmem {GIB}\ninactive_file {GIB // 4}\nactive_file {3 * GIB // 4}\n"
    )
    return folder


def test_the_smaller_of_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 99 kB\nMemAvailable:   {8 * 2**20} kB\n")
    none, limited = tmp_path / "none", _control_group(tmp_path / "limited", str(4 * GIB))
    assert available_bytes(meminfo, none) == 8 * GIB
    assert available_bytes(meminfo, limited) == 2 * GIB  # 4 allowed, 3 used, of which 1 is cache and 1 a tmpfs
    assert available_bytes(tmp_path / "absent", limited) == 2 * GIB
    assert available_bytes(meminfo, _control_group(tmp_path / "unlimited", "max")) == 8 * GIB


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "absent", tmp_path / "absent") > 0
    assert available_bytes() > 0
