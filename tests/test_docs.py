"""What the documents name is there: files, links, flags, the server's fields."""

from __future__ import annotations

import fnmatch
import pathlib
import re

import pytest

from dflash_jax.serve.chat_requests import ChatRequest
from dflash_jax.serve.requests import CompletionRequest

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [*(ROOT / "scripts").glob("*.py"), *(ROOT / "dflash_jax").rglob("*.py")]
FOLDERS = ("configs", "dflash_jax", "docs", "scripts", "tests", "third_party")
# A path from the root, which may have a `*`; or a bare name of a document or source, of any folder.
PATH = re.compile(rf"(?<![\w./])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w/*]")
NAME = re.compile(r"(?<![\w./*…])[\w*-]+\.(?:md|py|sh)\b")
LINK = re.compile(r"\]\(([^)#]+)")
NOT_OURS = ("flagfile", "xla_")  # absl's and XLA's flags begin so


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_links_exist(document):
    text = document.read_text()
    links = [link for link in LINK.findall(text) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    missing += [path for path in PATH.findall(text) if not any(ROOT.glob(path.rstrip("/")))]
    known = [path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    names = NAME.findall(text)
    missing += [name for name in names if not fnmatch.filter(known, name)]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_flags_exist(document):
    source = "".join(path.read_text() for path in SOURCES)
    flags = set(re.findall(r"(?<![\w-])--([a-z]\w*)", document.read_text()))
    unknown = {
        flag
        for flag in flags
        if not flag.startswith(NOT_OURS)
        and not any(f'"{name}"' in source for name in (flag, flag.removeprefix("no")))
    }
    assert unknown == set()


def test_the_servers_fields_are_in_one_table():
    text = (ROOT / "docs" / "serving.md").read_text()
    table = text.partition("| field | type, range | default |\n")[2].partition("\n\n")[0]
    firsts = [line.split("|")[1] for line in table.splitlines()]
    named = [name for first in firsts for name in re.findall(r"`(\w+)`", first)]
    fields = CompletionRequest.model_fields | ChatRequest.model_fields
    assert sorted(named) == sorted(fields)
