from cuda_agent.pages.whole import render
from cuda_agent.sandbox.wire import Verdict

PART = {
    "title": "layers.0 and 1 equal", "names": ["layers.0", "layers.2"], "class": "<b>Layer</b>", "share": 0.6,
    "bound": 2.5, "isolated": 3.0, "isolated_compile": 2.0, "expected": 1.67, "integrated": 1.5, "kept": True,
    "note": "",
}  # fmt: skip
OTHER = PART | {"title": "head", "names": ["head"], "share": 0.3, "kept": False, "isolated": None, "note": "no <gain>"}
STRICT = {"baselines": {"eager_fp32": 1.5, "max_autotune_fp32": 1.2}, "intervals": {}, "failed": {}}
VERDICT = Verdict("ok", "python", "strict", "cpu", "real", "", 1.0, 1.5, 1.3, strict=STRICT)


def test_the_page_shows_each_part_alone_and_in_the_model():
    page = render("net", "class Model: ...", [PART, OTHER], VERDICT, True, "target 1.05×", "m at http://x")
    for said in (
        "1.50× as fast as eager",
        "3.00×",
        "1.67×",
        "60",
        "max-autotune fp32",
        "1 part of 2 replaced",
        "torch.compile for the rest",
    ):
        assert said in page, said
    assert 'href="parts/layers.0/report.html"' in page and 'href="parts/head' not in page
    assert "<b>Layer" not in page and "no &lt;gain&gt;" in page and "<script" not in page


def test_the_page_is_whole_without_a_result():
    page = render("net", "code", [OTHER], None, False, "no target", "m")
    assert "no part makes the model faster" in page and "as fast as before" in page
