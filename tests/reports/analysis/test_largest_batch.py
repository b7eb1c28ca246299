import dataclasses

from journals import max_batch_record, result_of

from te_bench.reports.page import step_tables


def test_max_batch_reports_what_fits_and_what_failed(tmp_path):
    [found] = result_of(tmp_path, [max_batch_record("flash", 132)]).largest_batches
    assert (found.max_batch, found.first_failed, found.peak_allocated) == (132, 136, 132 * 2**30)
    assert found.limit_gib == 139
    assert not found.capped


def test_a_batch_at_which_the_search_ended_is_that_many_or_more(tmp_path):
    one = max_batch_record("flash", 65536)
    capped = dataclasses.replace(one, work={"tries": one.work["tries"][:2], "capped": True})
    table = step_tables.largest_batch(result_of(tmp_path, [capped]))
    assert table is not None
    assert [[shown.text for shown in row] for row in table.only({"Largest batch"}).rows] == [["65,536 or more"]]
