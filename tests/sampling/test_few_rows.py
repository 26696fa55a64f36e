"""The compiled product of few rows: right, independent of the rows beside it, and absent without harm."""

import shutil

import pytest
import torch
from native_library import forget_native
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from gspo.runs import _other_identity
from gspo.sampling.local.choose import Borrowed
from gspo.sampling.native import few_rows, library

pytestmark = pytest.mark.run  # compiling starts a process


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@needs_compiler
@pytest.mark.parametrize("num_in", [1, 287, 288, 289, 576])
@pytest.mark.parametrize("num_out", [1, 5, 6, 239, 241, 500])
def test_the_product_is_that_of_pytorch(num_in, num_out):
    product = few_rows.load_native().product
    for rows in (1, 9, 16, 33, 64):
        x, weight = torch.randn(rows, num_in), torch.randn(num_out, num_in)
        torch.testing.assert_close(product(x, weight).double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)


@needs_compiler
def test_a_row_does_not_depend_on_its_neighbours_or_on_the_threads():
    product = few_rows.load_native().product
    x, weight = torch.randn(64, 600), torch.randn(700, 600)
    together, threads = product(x, weight), torch.get_num_threads()
    for rows in (1, 7, 16, 41):
        assert torch.equal(product(x[:rows], weight), together[:rows])
    try:
        torch.set_num_threads(2)
        assert torch.equal(product(x, weight), together)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_it_is_checked_in_float32_whatever_the_default_type_is(native_anew):
    torch.set_default_dtype(torch.float64)
    try:
        found = few_rows.load_native()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.product is not None, found.why


@needs_compiler
def test_it_is_compiled_once_and_found_again(native_anew):
    first = few_rows.load_native()
    assert first.product is not None
    made = (native_anew / "native").iterdir()
    (file,) = made
    before = file.stat().st_mtime_ns
    forget_native()
    assert few_rows.load_native().product is not None
    assert file.stat().st_mtime_ns == before


@needs_compiler
def test_a_library_that_computes_wrong_products_is_not_used(native_anew, monkeypatch):
    wrong = shutil.copytree(library._FOLDER, native_anew / "sources")
    header = wrong / "product.h"
    text = header.read_text()
    header.write_text(text.replace("sum[o][1] += high * weight", "sum[o][1] -= high * weight"))
    assert header.read_text() != text
    monkeypatch.setattr(library, "_FOLDER", wrong)
    found = few_rows.load_native()
    assert found.product is None
    assert "computes wrong products" in found.why


def test_without_a_compiler_pytorch_computes_and_the_reason_is_given(native_anew, monkeypatch):
    monkeypatch.setenv("PATH", str(native_anew))
    monkeypatch.delenv("CC", raising=False)
    found = few_rows.load_native()
    assert found.product is None
    assert "there is no C compiler" in found.why
    assert few_rows.product_name(nn.Linear(512, 512)) == "torch"


def test_a_compiler_that_fails_is_named(native_anew, monkeypatch):
    broken = native_anew / "cc"
    broken.write_text("#!/bin/sh\necho no such option >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert few_rows.load_native().why == f"{broken}: exit code 3: no such option"


@needs_compiler
def test_only_large_layers_in_float32_use_it(native_anew, monkeypatch):
    assert few_rows.product_name(nn.Linear(512, 512)) == f"native {library.sources_digest()}"
    assert few_rows.product_name(nn.Linear(511, 511)) == "torch"
    assert few_rows.product_name(nn.Linear(512, 512, dtype=torch.float64)) == "torch"
    monkeypatch.setenv("GSPO_NATIVE", "0")
    forget_native()
    assert few_rows.product_name(nn.Linear(512, 512)) == "torch"


@needs_compiler
@pytest.mark.parametrize("bias", [True, False])
def test_a_borrowed_model_uses_it_and_gives_the_layer_back(bias):
    config = LlamaConfig(
        vocab_size=600, hidden_size=512, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=False, mlp_bias=bias,
    )  # fmt: skip
    model, x = LlamaForCausalLM(config).eval(), torch.randn(1, 32, 512)
    model.lm_head.bias = nn.Parameter(torch.randn(600)) if bias else None
    plain = model.lm_head(x)
    with Borrowed(model).engaged("sdpa"):
        fast = model.lm_head(x)
    torch.testing.assert_close(fast, plain, atol=1e-4, rtol=1e-4)
    expected = few_rows.load_native().product(x[0], model.lm_head.weight)
    assert torch.equal(fast[0], expected + model.lm_head.bias if bias else expected)
    assert torch.equal(model.lm_head(x), plain)


def test_a_run_that_was_sampled_with_other_products_names_the_remedy(tmp_path):
    assert "GSPO_NATIVE=0" in _other_identity(tmp_path, {"products": ("torch", "native 1")})
    assert "install a C compiler" in _other_identity(tmp_path, {"products": ("native 1", "torch")})
    assert "install the version of gspo" in _other_identity(tmp_path, {"products": ("native 1", "native 2")})
    assert "belongs to another run" in _other_identity(tmp_path, {"data": ("a", "b"), "products": ("torch", "native")})
