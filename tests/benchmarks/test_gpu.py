"""The table of what ran on a GPU."""

from benchmarks import __main__ as benchmarks
from benchmarks import gpu

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_cuda" name="test_a[x]" time="1.0"/>
<testcase classname="tests.test_cuda" name="test_a[y]" time="2.0">
  <failure message="assert 1 == 2&#10;more">...</failure></testcase>
<testcase classname="tests.test_cuda" name="test_b" time="0.5">
  <skipped message="needs two GPUs">...</skipped></testcase>
</testsuite></testsuites>"""


def test_cases_of_a_function_are_one_row(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    first, second = gpu.tested(path)
    assert first == ("tests.test_cuda.test_a", "1 passed; 1 failure: assert 1 == 2", 3.0)
    assert second == ("tests.test_cuda.test_b", "skipped: needs two GPUs", 0.5)
    assert "| tests.test_cuda.test_b | skipped: needs two GPUs | 0.5 |" in gpu.table([first, second])


def test_what_no_time_is_left_for_is_named():
    found = gpu.run(minutes=0)
    assert [each.name for each in found] == ["all tests", *(f"benchmark {name}" for name in gpu.BENCHMARKS)]
    assert {each.result for each in found} == {"not run: no time was left"}
    assert set(gpu.BENCHMARKS) <= set(benchmarks.NAMES)
