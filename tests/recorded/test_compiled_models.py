"""The table of what the compiler makes of whole models, from rows made up."""

from compiled_models import table


def test_compiled_row_counts_builds_kernels_and_effective_edges():
    ok = {"model": "net", "refusal": ""}
    effects = {"taken": 9, "inside": 1}
    same, other = ({"placement_digest": name, "kernels_digest": "k"} for name in ("a", "b"))
    rows = [
        {**ok, "kind": "int8", "placement": "all", "kernels": {"int8": 3, "f32": 2}, "effects": effects, **same},
        {**ok, "kind": "int8", "placement": "random0", "kernels": {"f32": 2}, "effects": {"float": 5}, **other},
        {**ok, "kind": "int8", "placement": "modelopt_ptq", "kernels": {}, "effects": {"taken": 4}},
        {**ok, "kind": "fp8", "placement": "all", "refusal": "the builder refuses it"},
    ]
    assert list(table(rows))[2:] == [
        "| net | 3 of 4 | 1 of 2 | 3 of 5 | - | 90.0% of 10 | - | - | 100.0% of 4 |",
        "| all | 3 of 4 | 1 of 2 |  |  | 90.0% of 10 | - | - | 100.0% of 4 |",
    ]
