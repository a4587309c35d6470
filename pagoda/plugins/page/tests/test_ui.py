# SPDX-License-Identifier: Apache-2.0
"""The files of the page: open to all, of the right types, and with nothing from elsewhere in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagoda.api.auth.keys import ApiKeys
from pagoda.plugins import page

DIRECTORY = Path(page.__file__).parent / "files"
FILES = sorted(path.name for path in DIRECTORY.iterdir())
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@pytest.mark.parametrize("loading", [False, True])
async def test_the_page_is_open_and_what_it_shows_is_not(serve_api, loading: bool) -> None:
    api = await serve_api(api_keys=ApiKeys(["secret"]), loading=loading)
    answer = await api.get("/")
    assert (answer.status, answer.body) == (200, (DIRECTORY / "index.html").read_bytes())
    for path in ("/v1/live", "/v1/requests", "/v1/models"):
        assert (await api.get(path)).status == 401


@pytest.mark.parametrize("name", FILES)
async def test_each_file_has_its_type_and_an_etag(api, name: str) -> None:
    answer = await api.get(f"/ui/{name}")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == TYPES[Path(name).suffix]
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    etag = answer.headers["ETag"]
    for known in (etag, f'"other", W/{etag}', "*"):
        again = await api.get(f"/ui/{name}", headers={"If-None-Match": known})
        assert (again.status, again.body, again.headers["ETag"]) == (304, b"", etag)
    other = await api.get(f"/ui/{name}", headers={"If-None-Match": '"other"'})
    assert other.status == 200


async def test_head_has_no_body(api) -> None:
    for path in ("/", "/ui/main.js"):
        whole = await api.get(path)
        head = await api.request("HEAD", path)
        assert (head.status, head.body) == (200, b"")
        assert head.headers["Content-Length"] == str(len(whole.body))


@pytest.mark.parametrize("name", ["nothing.js", "../page.py", "%2e%2e/page.py", "/index.html"])
async def test_there_is_nothing_else(api, name: str) -> None:
    answer = await api.get(f"/ui/{name}")
    assert answer.status == 404
    assert answer.error()["message"]


@pytest.mark.parametrize("name", FILES)
def test_everything_that_a_file_names_is_there(name: str) -> None:
    text = (DIRECTORY / name).read_text(encoding="utf-8")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    for target in re.findall(r"""(?:from|import) "\./([^"]+)"|["(]/ui/([^"]+)\"""", text):
        assert "".join(target) in FILES


def test_no_script_or_style_is_inline() -> None:
    text = (DIRECTORY / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>(.*?)</script>", text) == [""]
    assert not re.search(r"<style|\sstyle=|\son\w+=", text)
