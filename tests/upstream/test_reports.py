"""Reports for others: each program still shows the defect that it is about, on the release that is installed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
HERE = DOCS / "upstream"
REPORTS = sorted(HERE.glob("*.py"))
LONGEST = 60
"""Lines of a report."""
TORCHRUN, ALONE = "torchrun --nproc-per-node 2 this.py", "python this.py"
"""How a report is run, as its first line says."""
NO_PLACEMENT = "in-place operations that require placement changes"
SHOWS = {
    "colwise_fewer_rows_than_ranks": NO_PLACEMENT,
    "deepspeed_zero1_leaves_out_what_is_frozen": "ZeRO-1, frozen and trained weight: got [0.0, 1.0], wanted [1.0, 1.0]",
    "dtensor_empty_batch_never_returns": "view_groups",
    "dtensor_largest_of_an_empty_shard": "does not have an identity' on rank 1; wanted 'a value' on both",
    "fsdp1_clip_grad_norm_of_float64": "should be convertible without narrowing",
    "fsdp1_frozen_unit_passes_its_input": "current state is TrainingState.FORWARD_BACKWARD, wanted 2.0",
    "fsdp1_hooks_of_frozen_modules": "got 1, wanted 0",
    "fsdp1_hybrid_shard_of_one": "got 0.5, wanted 1.5",
    "fsdp1_no_sync_adds_in_param_dtype": "got 256.0, wanted 258.0",
    "fsdp1_tied_weights_and_no_sync": "attempting to assign a gradient with dtype",
    "fsdp1_tied_weights_of_two_units": "got 9.0, wanted 18.0",
    "fsdp1_thawed_under_no_sync": "got 1.0, wanted 2.0",
    "fsdp1_training_behind_inference_mode": "The `grad_fn` is needed",
    "fsdp1_whole_gradients_of_float64": "Detected mismatch between collectives",
    "fully_shard_divides_twice": "got 4.0, wanted 8.0",
    "fully_shard_first_forward_in_inference_mode": "Inference tensors cannot be saved for backward",
    "fully_shard_layers_of_one_rank": "Detected mismatch between collectives",
    "fully_shard_reset_before_first_forward": "no attribute 'all_gather_state'",
    "fully_shard_reset_keeps_gradients": "got 260.0, wanted 4.0",
    "fully_shard_thawed_behind_an_evaluation": "got [True, False, False], wanted [True, True, True]",
    "gloo_tensors_with_gaps": "got [0.0, 3.0, 6.0, 3.0, 4.0, 5.0], wanted [0.0, 1.0, 6.0, 3.0, 12.0, 5.0]",
    "muon_fewer_rows_than_ranks": NO_PLACEMENT,
    "opacus_bags_without_offsets": "not enough values to unpack",
    "opacus_batch_without_samples": "cannot reshape tensor of 0 elements",
    "opacus_empty_draws_left_out": "wanted 16",
    "opacus_fewer_rows_than_ranks": NO_PLACEMENT,
    "opacus_indices_not_contiguous": "view size is not compatible",
    "opacus_layer_norm_without_bias": "no attribute 'requires_grad'",
    "opacus_one_stream_on_all_ranks": "got 256, wanted about 128",
    "opacus_padding_row_in_norms": "got [2.236",
    "opacus_sum_is_a_mean_over_ranks": "got [1.0, -1.0], wanted [2.0, -2.0]",
    "opacus_padding_mode_unread": "got [3.0, 0.0], wanted [5.0, 1.0]",
    "opacus_trains_padding_row": ", wanted 0.0",
    "opacus_weight_beside_its_layer": "got [5.0, 1.0], wanted [10.0, 2.0]",
    "sequence_parallel_thaws": "SequenceParallel thawed",
}
"""What each prints where it shows its defect. A report that fails of anything else shows nothing."""

pytestmark = pytest.mark.skipif(not HERE.is_dir(), reason="only a checkout has the documents")
each = pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.stem)


def _first_line(report: Path) -> str:
    return report.read_text(encoding="utf-8").splitlines()[0]


def _of(report: Path) -> str:
    """The distribution that it is about."""
    return next((name for name in ("deepspeed", "opacus") if report.stem.startswith(name)), "torch")


def _ran(report: Path, alone: bool) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec(_of(report)) is None:
        pytest.skip(f"the extra {_of(report)} is missing")
    torchrun = [] if alone else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([sys.executable, *torchrun, str(report)], capture_output=True, text=True, check=False)


def _listed(text: str) -> list[str]:
    return re.findall(r"^\| \[(\w+\.py)\]\(\1\)", text, re.MULTILINE)


def test_every_report_is_listed_and_is_a_short_program_of_its_own() -> None:
    listed = _listed((HERE / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == [report.name for report in REPORTS]
    assert SHOWS.keys() == {report.stem for report in REPORTS}
    assert len(REPORTS) > 1
    for report in REPORTS:
        text = report.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= LONGEST
        assert not re.search(r"^\s*(import|from) fsdpcheck", text, re.MULTILINE)
        assert _first_line(report).endswith((f": {TORCHRUN}", f": {ALONE}"))


def test_the_findings_have_a_link_to_every_report() -> None:
    found = re.findall(r"\]\(upstream/(\w+\.py)\)", (DOCS / "findings.md").read_text(encoding="utf-8"))
    assert sorted(set(found)) == [report.name for report in REPORTS]


@pytest.mark.nightly
@each
def test_a_report_still_shows_its_defect(report: Path) -> None:
    ran = _ran(report, alone=_first_line(report).endswith(f": {ALONE}"))
    release = f"{_of(report)} {metadata.version(_of(report))}"
    what = "what docs/upstream/README.md says that it keeps from being checked"
    assert ran.returncode != 0, f"mended in {release}: next: drop {what}"
    assert SHOWS[report.stem] in ran.stdout + ran.stderr, f"{release}: {ran.stdout}{ran.stderr}"


@pytest.mark.nightly
@each
def test_a_report_of_two_ranks_says_so_where_it_is_run_alone(report: Path) -> None:
    if _first_line(report).endswith(f": {ALONE}"):
        pytest.skip("one process is enough")
    ran = _ran(report, alone=True)
    assert ran.returncode != 0
    assert "Traceback" not in ran.stderr
    assert ran.stderr.splitlines()[-1] == f"to be run by: torchrun --nproc-per-node 2 {report}"
