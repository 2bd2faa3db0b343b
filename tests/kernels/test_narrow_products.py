"""32-bit products are found in Triton's intermediate code, each with its line of source."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.narrow_products import narrow_products

SOURCE = """
rows = offsets * stride
first = tile * BLOCK
"""
CODE = """
#loc = loc("{file}":2:8)
#loc1 = loc("{file}":3:9)
#loc2 = loc("{file}":9:9)
#loc3 = loc("rows"(#loc))
#loc4 = loc(callsite(#loc3 at #loc2))
    %c64_i32 = arith.constant 64 : i32 loc(#loc)
    %first = arith.muli %tile, %c64_i32 : i32 loc(#loc1)
    %rows_3 = {product} loc(#loc4)
"""


@pytest.mark.parametrize(
    ("product", "found"),
    [
        ("arith.muli %offsets, %spans.1.2 : i32", True),
        ("arith.muli %offsets, %at#1 : tensor<64x1xi32>", True),
        ("arith.muli %offsets, %stride overflow<nsw> : tensor<64xi32>", True),
        ("arith.muli %offsets, %stride : tensor<64x1xi64>", False),
        ("arith.muli %offsets, %stride : i64", False),
        ("arith.muli %c64_i32, %stride : i32", False),
        ("arith.addi %offsets, %stride : i32", False),
    ],
)
def test_a_32_bit_product_is_told_by_its_line(product: str, found: bool, tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(SOURCE)
    expected = ["kernel.py: rows = offsets * stride"] if found else []
    assert narrow_products(CODE.format(file=file, product=product)) == expected
