"""A trace on disk: what was written is what is read, and nothing else is."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tracemalloc
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from specnb.divergence import trace as trace_module
from specnb.divergence.trace import PARAM_COLUMNS, TENSOR_COLUMNS, Trace, table
from specnb.divergence.tracing import bounded_parquet, packed
from specnb.divergence.tracing.page_headers import Page, pages
from specnb.errors import InputError

DEFAULTS = {"int64": 0, "str": "x", "float64": 0.5, "bool": True, "ints": (2, 3)}


def row(columns, **values):
    return {name: DEFAULTS[kind] for name, kind in columns.items()} | values


def example():
    tensors = [
        row(TENSOR_COLUMNS, row=0, role="in", module="layers.0", token_axis=0),
        row(TENSOR_COLUMNS, row=1, role="out", module="layers.0", token_axis=-1, mean=float("nan"), shape=()),
    ]
    arrays = {"0.tokens": np.ones((2, 16), np.float32), "0.token_l2": np.ones(2, np.float32)}
    arrays["0.full"] = np.arange(6).reshape(2, 3)
    params = [row(PARAM_COLUMNS, owner="target", object_id=1 << 47)]
    return Trace({"tag": "draft", "steps": [1]}, table(tensors, TENSOR_COLUMNS), table(params, PARAM_COLUMNS), arrays)


@contextmanager
def peak_of_python(at_most):
    """Python and numpy take no more memory than this inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= at_most
    finally:
        tracemalloc.stop()


def reseal(folder, name, data):
    """Put another file in place with the digest that fits it: a forger can do that, damage cannot."""
    (folder / name).write_bytes(data)
    document = json.loads((folder / "facts.json").read_text())
    document["trace"]["sha256"][name] = hashlib.sha256(data).hexdigest()
    (folder / "facts.json").write_text(json.dumps(document))


def test_what_is_saved_is_what_is_loaded(tmp_path):
    trace = example()
    read = Trace.load(trace.save(tmp_path / "deep" / "trace"))
    pd.testing.assert_frame_equal(read.tensors, trace.tensors)
    pd.testing.assert_frame_equal(read.params, trace.params)
    assert read.facts == trace.facts
    assert read.arrays.keys() == trace.arrays.keys()
    assert all(np.array_equal(read.arrays[key], trace.arrays[key]) for key in trace.arrays)
    assert read.tensors["shape"].tolist() == [(2, 3), ()]
    assert not [path for path in (tmp_path / "deep" / "trace").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("full", [np.array(2.5), np.array([1 + 2j], np.complex64), np.zeros((2, 0)), np.array([True])])
def test_a_tensor_of_any_shape_and_type_can_be_kept_in_full(tmp_path, full):
    tensors = table([row(TENSOR_COLUMNS, row=4, role="out", token_axis=-1, shape=full.shape)], TENSOR_COLUMNS)
    read = Trace.load(Trace({}, tensors, table([], PARAM_COLUMNS), {"4.full": full}).save(tmp_path)).array(4, "full")
    assert (read.shape, read.dtype, read.tolist()) == (full.shape, full.dtype, full.tolist())


def test_an_empty_trace_can_be_stored(tmp_path):
    empty = Trace({}, table([], TENSOR_COLUMNS), table([], PARAM_COLUMNS), {})
    read = Trace.load(empty.save(tmp_path))
    pd.testing.assert_frame_equal(read.tensors, empty.tensors)


def test_rows_are_found_by_their_values():
    trace = example()
    assert trace.rows(module="layers.0", role="out")["row"].tolist() == [1]
    assert trace.rows(module="elsewhere").empty
    assert trace.array(0, "full").shape == (2, 3) and trace.array(1, "tokens") is None
    with pytest.raises(InputError, match="no column 'modul'"):
        trace.rows(modul="layers.0")


def test_reading_a_trace_needs_no_torch(tmp_path):
    example().save(tmp_path)
    code = "import sys; from pathlib import Path; from specnb.divergence.trace import Trace\n"
    code += f"Trace.load(Path({str(tmp_path)!r})); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["tensors.parquet", "params.parquet", "arrays.safetensors", "facts.json"])
def test_a_missing_or_damaged_file_is_named(tmp_path, name):
    folder = example().save(tmp_path)
    path = folder / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(InputError, match=name):
        Trace.load(folder)
    path.unlink()
    with pytest.raises(InputError, match=name):
        Trace.load(folder)


@pytest.mark.parametrize("name", ["engine", "tag", "dtype"])
def test_facts_that_are_no_names_are_refused(tmp_path, name):
    folder = Trace({"steps": [], name: ["a", "b"]}, table([], TENSOR_COLUMNS), table([], PARAM_COLUMNS), {}).save(
        tmp_path
    )
    with pytest.raises(InputError, match=rf"facts\.json: {name} is \['a', 'b'\], not a name"):
        Trace.load(folder)


def test_files_of_two_traces_do_not_mix(tmp_path):
    one, other = example().save(tmp_path / "a"), example()
    other.arrays["0.tokens"][1, 3] = 2
    other.save(tmp_path / "b")
    (one / "arrays.safetensors").write_bytes((tmp_path / "b" / "arrays.safetensors").read_bytes())
    with pytest.raises(InputError, match="not the file that facts"):
        Trace.load(one)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("version", 1, "version 1"),
        ("version", 3, "version 3"),
        ("version", None, "version None"),
        ("digest", "blake2b", "'blake2b', .* 'xxh3-128'"),
        ("digest", None, "None, .* 'xxh3-128'"),
    ],
)
def test_another_version_and_digests_of_another_kind_are_refused(tmp_path, key, value, told):
    folder = example().save(tmp_path)
    document = json.loads((folder / "facts.json").read_text())
    document["trace"][key] = value
    (folder / "facts.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=told):
        Trace.load(folder)


def test_arrays_lie_end_to_end_and_come_back_to_their_rows(tmp_path):
    rng = np.random.default_rng(0)
    counts = {7: 3, 0: 0, 2: 5, 11: 1}
    arrays = {f"{row}.tokens": rng.random((n, 16), np.float32) for row, n in counts.items()}
    arrays |= {f"{row}.token_l2": rng.random(n, np.float32) for row, n in counts.items()}
    arrays["3.full"] = np.arange(4)
    data = packed.to_bytes(arrays, 1 << 20)
    assert {name: value.shape for name, value in load_arrays(data).items()} == {
        "tokens": (9, 16), "token_l2": (9,), "rows": (4,), "counts": (4,), "3.full": (4,),
    }  # fmt: skip
    read = packed.from_bytes(data, dict.fromkeys(range(12), (4,)), tmp_path)
    assert read.keys() == arrays.keys() and all(np.array_equal(read[key], arrays[key]) for key in arrays)
    assert read["2.tokens"].base is read["7.tokens"].base  # views: nothing is there twice


def stored_and_read(n_rows):
    """Rows of one token each, through a file, and how long its header is."""
    tokens, norms = np.ones((1, 16), np.float32), np.ones(1, np.float32)
    arrays = {f"{row}.tokens": tokens for row in range(n_rows)} | {f"{row}.token_l2": norms for row in range(n_rows)}
    data = packed.to_bytes(arrays, 1 << 30)
    read = packed.from_bytes(data, dict.fromkeys(range(n_rows), (1, 4)), Path("arrays.safetensors"))
    assert read.keys() == arrays.keys() and np.array_equal(read[f"{n_rows - 1}.tokens"], tokens)
    return int.from_bytes(data[:8], "little")


def test_more_rows_make_no_longer_header():
    assert stored_and_read(5000) < stored_and_read(5) + 100  # longer numbers, no more of them


@pytest.mark.slow
def test_the_arrays_of_a_long_generation_can_be_stored():
    """The header of a safetensors file holds no more than some 600,000 arrays of their own."""
    assert stored_and_read(700_000) < 1000


STORED = {
    "tokens": np.ones((5, 16), np.float32), "token_l2": np.ones(5, np.float32),
    "rows": np.array([0, 1]), "counts": np.array([2, 3]), "0.full": np.zeros((2, 3)),
}  # fmt: skip
HUGE = 1 << 62


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"counts": np.array([2, 2])}, "does not add up to the 5 tokens"),
        ({"counts": np.array([2, 4])}, "does not add up"),
        ({"counts": np.array([-1, 6])}, "does not add up"),
        ({"counts": np.array([0, HUGE])}, "does not add up"),
        ({"counts": np.array([HUGE, HUGE, HUGE, HUGE + 5]), "rows": np.arange(4)}, "does not add up"),
        ({"counts": np.array([5])}, "lengths"),
        ({"token_l2": np.ones(4, np.float32)}, "lengths"),
        ({"rows": np.array([0, 0])}, "twice"),
        ({"rows": np.array([1, 0])}, "does not rise"),
        ({"rows": np.array([0, 9])}, "`rows` has 9, which is no row"),
        ({"rows": np.array([-1, 0])}, "`rows` has -1"),
        ({"rows": np.array([0, 1], np.int32)}, "`rows` is int32"),
        ({"rows": np.array([[0, 1]])}, "`rows` is int64 of shape"),
        ({"counts": np.array([2.0, 3.0])}, "`counts` is float64"),
        ({"counts": None}, "`counts` is missing"),
        ({"tokens": np.ones((5, 15), np.float32)}, "`tokens` is float32 of shape"),
        ({"tokens": np.ones((5, 16))}, "`tokens` is float64"),
        ({"tokens": np.full((5, 16), np.nan, np.float32)}, "not finite"),
        ({"token_l2": np.full(5, np.inf, np.float32)}, "not finite"),
        ({"0.full": np.zeros((3, 3))}, r"0\.full has shape \(3, 3\), its row \(2, 3\)"),
        ({"9.full": np.zeros((2, 3))}, "belongs to no row"),
        ({"00.full": np.zeros((2, 3))}, "belongs to no row"),
        ({"0.sketch": np.zeros(64, np.float32)}, "belongs to no row"),
        ({"../0.full": np.zeros((2, 3))}, "belongs to no row"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(tmp_path, entries, told):
    folder = example().save(tmp_path)
    rows = 4 if len(entries.get("rows", ())) == 4 else 2
    tensors = [row(TENSOR_COLUMNS, row=i, role="in", token_axis=0) for i in range(rows)]
    reseal(
        folder, "tensors.parquet", trace_module._to_parquet(table(tensors, TENSOR_COLUMNS), TENSOR_COLUMNS, "tensors")
    )
    reseal(folder, "arrays.safetensors", save_arrays(STORED))
    assert Trace.load(folder).array(1, "tokens").shape == (3, 16)
    changed = {name: value for name, value in (STORED | entries).items() if value is not None}
    reseal(folder, "arrays.safetensors", save_arrays(changed))
    with peak_of_python(1 << 22), pytest.raises(InputError, match=rf"arrays\.safetensors: .*{told}"):
        Trace.load(folder)


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"0.sketch": np.ones(64, np.float32)}, "'0.sketch' has no place"),
        ({"x.tokens": np.ones((1, 16), np.float32)}, "'x.tokens' has no place"),
        ({"00.full": np.ones((2, 3))}, "'00.full' has no place"),
        ({"1.tokens": np.ones((1, 16), np.float32)}, "row 1 of the trace has only one"),
        ({"0.token_l2": np.ones(3, np.float32)}, "row 0 .* token_l2 float32 .3,."),
        ({"0.token_l2": np.float32(1)}, "row 0"),
        ({"0.tokens": np.ones((2, 16))}, "row 0 of the trace has tokens float64"),
        ({"1.full": np.array("text")}, "cannot be stored as safetensors"),
    ],
)
def test_arrays_that_a_trace_has_not_are_refused_and_nothing_is_written(tmp_path, arrays, told):
    trace = example()
    with pytest.raises(InputError, match=told):
        Trace({}, trace.tensors, trace.params, trace.arrays | arrays).save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_more_than_can_be_read_again_is_not_written(tmp_path, monkeypatch):
    for name, limit, told in (
        ("MAX_ROWS", 1, "tensors of a trace has 2 rows, more than the 1"),
        ("MAX_BYTES", 100, "bytes, more than 100"),
        ("FACT_BYTES", 100, "facts of a trace take .* bytes, more than the 100"),
    ):
        with monkeypatch.context() as patched, pytest.raises(InputError, match=told):
            patched.setattr(trace_module, name, limit)
            example().save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("column", "value"),
    [("row", 1), ("row", -1), ("role", "inside"), ("token_axis", 2), ("token_axis", -2), ("shape", (2, -3))],
)
def test_a_table_that_makes_no_sense_is_refused(tmp_path, column, value):
    trace = example()
    trace.tensors.at[0, column] = value
    with pytest.raises(InputError, match=r"tensors\.parquet"):
        Trace.load(trace.save(tmp_path))


@pytest.mark.parametrize("column", ["module", "row", "mean"])
def test_a_table_without_a_column_or_of_another_type_is_refused(tmp_path, column):
    trace = example()
    folder = trace.save(tmp_path)
    for frame in (trace.tensors.drop(columns=column), trace.tensors.assign(**{column: [[b"x"], [b"y"]]})):
        frame.to_parquet(folder / "other.parquet")
        reseal(folder, "tensors.parquet", (folder / "other.parquet").read_bytes())
        with pytest.raises(InputError, match=f"no column '{column}'"):
            Trace.load(folder)
    with pytest.raises(InputError, match=f"no column '{column}'"):
        Trace({}, trace.tensors.drop(columns=column), trace.params, {}).save(folder)


def test_an_empty_place_in_a_table_is_refused(tmp_path):
    trace = example()
    folder = trace.save(tmp_path)
    trace.tensors.at[0, "module"] = None
    trace.tensors.to_parquet(folder / "other.parquet")
    reseal(folder, "tensors.parquet", (folder / "other.parquet").read_bytes())
    with pytest.raises(InputError, match="empty place"):
        Trace.load(folder)


@pytest.mark.parametrize("facts", [{"x": float("nan")}, {"x": object()}])
def test_facts_that_json_cannot_hold_are_refused_and_nothing_is_written(tmp_path, facts):
    trace = example()
    with pytest.raises(InputError, match="JSON"):
        Trace(facts, trace.tensors, trace.params, trace.arrays).save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


LIMIT = 4 << 20
LONG = pa.array(["x" * 50_000])


@contextmanager
def peak(at_most):
    """Arrow takes no more memory than this inside."""
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        yield
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() <= at_most


def repeated(value, n_rows):
    """One value in many rows, which a dictionary holds once."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(n_rows, np.int32)), value)


def written(columns, **options):
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, store_schema=False, **options)
    return sink.getvalue()


def zeros(n_values, n_rows=1):
    """Rows of as many zeros each, which are written as one zero and how often."""
    offsets = pa.array(np.arange(n_rows + 1) * n_values, pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(np.zeros(n_values * n_rows, np.int64)))


def read(data, **types):
    return bounded_parquet.read_table(
        data, Path("t.parquet"), pa.schema(types), rows=200_000, memory=LIMIT, again="make it again"
    )


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"a": repeated(LONG, 20_000)}, pa.string()),
        ({"a": repeated(pa.array([7]), 200_000), "b": repeated(LONG, 200_000)}, pa.string()),
        ({"a": zeros(2_000_000)}, pa.list_(pa.int64())),
        ({"a": zeros(20, 100_000)}, pa.list_(pa.int64())),
        ({"a": repeated(pa.array([7]), 200_001)}, pa.int64()),
    ],
    ids=["a long text", "a long text beside numbers", "one long list", "many lists", "rows"],
)
def test_what_is_small_on_disk_and_huge_in_memory_is_refused_before_it_is_there(columns, kind):
    data = written(columns, compression="zstd")
    assert len(data) < 100_000
    types = {name: pa.int64() for name in columns} | {list(columns)[-1]: kind}
    with peak(at_most=LIMIT), pytest.raises(InputError, match=r"t\.parquet has \d+ (rows|bytes).*, more than"):
        read(data, **types)


def varint(number, size=0):
    """A whole number in a footer, stretched to so many bytes."""
    size = size or -(-(2 * number).bit_length() // 7)
    return bytes((2 * number >> 7 * i & 127) | (128 if i < size - 1 else 0) for i in range(size))


def forged(column):
    """A file whose footer says of a column that it is of one row, one value and one byte."""
    data = written({"a": column}, compression="zstd", write_statistics=False, data_page_size=1 << 30)
    at = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    said, footer = group.column(0), data[at:]
    for number in {said.num_values, said.total_uncompressed_size, group.total_byte_size, len(column)} - {1}:
        footer = footer.replace(varint(number), varint(1, len(varint(number))))
    return data[:at] + footer


@pytest.mark.parametrize(
    ("column", "kind"),
    [(zeros(5_000_000), pa.list_(pa.int64())), (pa.array(np.zeros(1_000_000)), pa.float64())],
    ids=["a list", "numbers"],
)
def test_what_a_footer_hides_is_refused_before_it_is_there(column, kind):
    data = forged(column)
    said = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(0)
    assert (said.num_values, said.total_uncompressed_size) == (1, 1)
    with peak(at_most=LIMIT), pytest.raises(InputError, match=r"has \d+ bytes.*, more than"):
        read(data, a=kind)


def test_rows_are_counted_again_while_they_are_read(monkeypatch):
    monkeypatch.setattr(bounded_parquet, "_check_counts", lambda *_: None)
    for column, kind in ((zeros(50, 190_000), pa.list_(pa.int64())), (np.zeros(10**7), pa.float64())):
        data = written({"a": column})
        with peak(at_most=8 * LIMIT), pytest.raises(InputError, match="more than"):
            read(data, a=kind)


def test_pages_that_are_none_are_refused():
    data = written({"a": pa.array(np.arange(1000))}, use_dictionary=False, compression="none")
    for at in range(4, 40):  # the header and what comes behind it
        for byte in (0, 0x2C, 0x19, 0xFF):
            changed = data[:at] + bytes([byte]) + data[at + 1 :]
            with suppress(InputError):
                assert read(changed, a=pa.int64()).num_rows == 1000


def number(n):
    """A whole number in a header."""
    return varint(n) if n else b"\0"


def field(last, this, kind, value):
    """A field of a header, `last` the number of the one before it."""
    return (bytes([this - last << 4 | kind]) if 0 < this - last < 16 else bytes([kind]) + number(this)) + value


SAID, PACKED, KIND = (
    field(0, 2, 5, number(6)),
    field(2, 3, 5, b"\0"),
    field(3, 5, 12, field(0, 1, 5, number(7)) + b"\0"),
)
"""Of a page that unpacks to 6 bytes, takes none, and has 7 values."""


def test_a_page_says_what_it_unpacks_to():
    data = SAID + PACKED + KIND + b"\0"
    assert [*pages(data, 0, len(data))] == [(6, 7)]


@pytest.mark.parametrize(
    "header",
    [
        SAID + field(2, 2, 6, number(1)) + PACKED + KIND,
        SAID + field(2, 2, 5, number(1)) + PACKED + KIND,
        SAID + field(2, 65538, 5, number(9)) + field(65538, 3, 5, b"\0") + KIND,
        field(0, 2, 6, number(6)) + PACKED + KIND,
        field(0, 2, 1, b"") + PACKED + KIND,
        SAID + PACKED + field(3, 5, 12, field(0, 1, 6, number(7)) + b"\0"),
        SAID + PACKED + field(3, 5, 12, field(0, 1, 5, number(7)) + field(1, 1, 6, number(1)) + b"\0"),
    ],
    ids=["again, longer", "again", "number that wraps", "longer", "a flag", "longer values", "values again, longer"],
)
def test_a_header_that_arrow_reads_otherwise_is_refused(header):
    data = header + b"\0"
    with pytest.raises(ValueError, match="header"):
        list(pages(data, 0, len(data)))


def test_very_many_pages_are_refused_while_they_are_counted(monkeypatch):
    seen = []

    def endless(*_):
        while True:
            seen.append(Page(0, 0))
            yield seen[-1]

    monkeypatch.setattr(bounded_parquet, "pages", endless)
    with pytest.raises(InputError, match=r"has \d+ pages, more than"):
        read(written({"a": pa.array([1])}), a=pa.int64())
    assert len(seen) == bounded_parquet.PAGES + 1


def test_a_file_of_another_writer_is_refused():
    other = written({"a": pa.array([1])}).replace(b"parquet-cpp-arrow", b"parquet-mr 1.2.8 ")
    with pytest.raises(InputError, match=r"parquet-mr 1\.2\.8 .*make it again"):
        read(other, a=pa.int64())


def test_tables_are_read_as_they_were_written_in_groups_and_batches():
    n_rows = 3 * bounded_parquet.BATCH + 5
    texts = pa.array([f"{i % 7}" * (i % 5) for i in range(n_rows)])
    lists = pa.array([list(range(i % 4)) for i in range(n_rows)])
    columns = {"text": texts, "lists": lists, "number": pa.array(np.arange(n_rows)), "more": texts}
    schema = {"text": pa.string(), "number": pa.int64(), "lists": pa.list_(pa.int64())}
    for options in ({"row_group_size": 20_000}, {"use_dictionary": False}, {"dictionary_pagesize_limit": 1}):
        found = read(written(columns, **options), **schema)
        assert found.column_names == list(schema)
        assert found.to_pydict() == {name: columns[name].to_pylist() for name in schema}
    assert read(written({name: columns[name][:0] for name in schema}), **schema).num_rows == 0


def test_texts_that_are_none_are_refused():
    offsets = pa.py_buffer(np.array([0, 1], np.int32).tobytes())
    with pytest.raises(InputError, match="UTF"):
        read(written({"a": pa.StringArray.from_buffers(1, offsets, pa.py_buffer(b"\xff"))}), a=pa.string())


def huge(schema, name, n_rows=20_000):
    """A file of rows that are all alike, in which the text `name` is long."""
    made = {
        pa.string(): repeated(pa.array(["x"]), n_rows), pa.int64(): pa.array(np.zeros(n_rows, np.int64)),
        pa.float64(): pa.array(np.zeros(n_rows)), pa.bool_(): pa.array(np.ones(n_rows, bool)),
        pa.list_(pa.int64()): zeros(1, n_rows),
    }  # fmt: skip
    return written({field.name: made[field.type] for field in schema} | {name: repeated(LONG, n_rows)})


def test_a_trace_of_texts_that_repeat_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "TABLE_BYTES", 8 * LIMIT)
    folder = example().save(tmp_path / "trace")
    reseal(folder, "tensors.parquet", huge(trace_module._schema(TENSOR_COLUMNS), "module"))
    with peak(at_most=8 * LIMIT), pytest.raises(InputError, match=r"\.parquet has \d+ bytes, more than"):
        Trace.load(folder)
