"""One JUnit file for a session of several pytest processes under an outer launcher, with a testsuite per process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from pytest_nsa.wire.files import write_atomically

_LAUNCH, _RANK = "nsa.launch", "nsa.rank"  # properties of a testsuite


def merge(target: Path, own: Path, launch: str, rank: int) -> None:
    """Put the testsuite of ``own`` into ``target``, next to those of other ranks of the same launch.

    A file of another launch is replaced. ``own`` is removed. Raises OSError; ``ET.ParseError`` if ``own`` is no XML.
    """
    tree = ET.parse(own)
    suites = [*tree.getroot().iter("testsuite")]
    for suite in suites:
        _mark(suite, launch, rank)
    with _locked(target):
        others = (suite for suite in _read_suites(target) if _property(suite, _LAUNCH) == launch)
        suites += [suite for suite in others if _property(suite, _RANK) != str(rank)]
        suites.sort(key=lambda suite: int(_property(suite, _RANK) or 0))
        root = ET.Element("testsuites", tree.getroot().attrib)
        root.extend(suites)
        write_atomically(target, ET.tostring(root, encoding="utf-8", xml_declaration=True), follow=True)
    own.unlink()


def _mark(suite: ET.Element, launch: str, rank: int) -> None:
    properties = suite.find("properties")
    if properties is None:
        properties = ET.Element("properties")
        suite.insert(0, properties)
    for name, value in ((_LAUNCH, launch), (_RANK, str(rank))):
        ET.SubElement(properties, "property", name=name, value=value)
    if rank:
        suite.set("name", f"{suite.get('name', 'pytest')} rank {rank}")


def _property(suite: ET.Element, name: str) -> str:
    found = suite.find(f"properties/property[@name='{name}']")
    return found.get("value", "") if found is not None else ""


def _read_suites(target: Path) -> list[ET.Element]:
    try:
        return [*ET.parse(target).getroot().iter("testsuite")]
    except (OSError, ET.ParseError):  # none yet, or a file that is about to be replaced
        return []


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold a lock on the folder of ``target``, which the kernel frees when its holder ends."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(target.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
