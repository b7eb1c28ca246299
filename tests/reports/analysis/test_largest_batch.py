from journals import max_batch_record, result_of


def test_max_batch_reports_what_fits_and_what_failed(tmp_path):
    [found] = result_of(tmp_path, [max_batch_record("flash", 132)]).largest_batches
    assert (found.max_batch, found.first_failed, found.peak_allocated) == (132, 136, 132 * 2**30)
    assert found.limit_gib == 139
