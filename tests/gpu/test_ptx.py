"""What PTX says, without a GPU: accesses of 16 bytes, no memory of threads, shuffles, LLVM's verifier."""

import re

import pytest
import torch
from torch.nn import functional as F

import kiln
from kiln.generate.device import generate
from kiln.generate.grid import laid, read_once
from kiln.generate.nvptx import VERSIONS

from .emitted import device_of, kernels_noted, kernels_of
from .programs import FOLDS, INTEGERS, POINTWISE, norm_gradients

HALF = torch.bfloat16


def count(pattern, text):
    return len(re.findall(pattern, text))


def softmax_gradient(grad, y):
    return torch.ops.aten._softmax_backward_data(grad, y, -1, HALF)


def grid_of(f, *inputs, clusters=True):
    (kernel,) = kernels_of(f, *inputs)
    return laid(kernel.nests[0], clusters)


@pytest.mark.parametrize("name", [*POINTWISE, *FOLDS, *INTEGERS])
def test_every_program_becomes_ptx(name):
    f, *makers = {**POINTWISE, **FOLDS, **INTEGERS}[name]
    made = device_of(f, *[make("cpu", HALF) for make in makers])
    assert made.starts and ".entry" in made.text and ".local" not in made.text
    for function in made.text.split(".entry")[1:]:  # nothing is read before what it is made by has ended
        assert "ld.global" not in function.partition("griddepcontrol.wait")[0]


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (HALF, 8), (torch.float64, 2)])
def test_16_bytes_at_once(dtype, width):
    x = torch.randn(64, 256).to(dtype)
    made = device_of(lambda a, b: a * b + 1, x, x.clone())
    assert (
        count(r"ld\.global\.nc\.v[24]\.b(32|64)", made.text) == 2
        and count(r"st\.global\.v[24]", made.text) == 1
    )
    assert grid_of(lambda a, b: a * b + 1, x, x.clone()).width == width
    assert "ld.param.b32" not in made.text  # sizes are numbers in the code


def test_no_number_is_the_smallest_integer_where_it_is_known_to_be_none():
    made = device_of(lambda a: a.mean(0).long(), torch.empty(0, 64, dtype=torch.float64))
    assert count(r"selp\S*\s+%rd\d+, \S+ -9223372036854775808", made.text)


def test_what_is_not_aligned_is_read_in_elements():
    x = torch.randn(64, 256)
    made = device_of(lambda a: a * 2, x, aligned=False)
    assert not count(r"ld\.global\S*\.v", made.text) and count(r"ld\.global\.nc\.b32", made.text) == 4


def test_odd_rows_are_read_in_elements_but_whole_tensors_are_not():
    x = torch.randn(13, 77)
    assert grid_of(lambda a, b: a + b, x, torch.randn(77)).width == 1
    assert grid_of(lambda a: a + 1, torch.randn(13, 76)).width == 4


def test_half_types_compute_in_f32_and_are_rounded_once():
    text = device_of(lambda a: (a + 1) * a + 2, torch.randn(64, 256).to(HALF)).text
    assert count(r"cvt\.rn\.bf16x2\.f32", text) == 4 and not count(r"(add|mul|sub)\S*\.bf16", text)


def test_a_row_is_read_once_and_shared_by_shuffles():
    made = device_of(lambda a: a.softmax(-1), torch.randn(8192, 1024))
    (start,), text = made.starts[0], made.text
    assert count(r"ld\.global\.nc\.v4", text) == 8 == count(r"st\.global\.v4", text)
    assert "shfl.sync.bfly" in text and "bar.sync" not in text  # a warp for each row
    assert (start.threads, start.blocks) == (128, 2048)


def test_long_rows_take_a_block_and_shared_memory():
    grid = grid_of(lambda a: a.softmax(-1), torch.randn(1024, 8192))
    assert (grid.team, grid.rows, grid.turns) == (256, 1, 8)
    text = device_of(lambda a: a.softmax(-1), torch.randn(1024, 8192)).text
    assert count(r"bar\.sync", text) == 2 and count(r"ld\.global\.nc\.v4", text) == 8


def test_rows_that_are_too_long_for_registers_are_copied_to_shared_memory():
    made = device_of(lambda a: a.softmax(-1), torch.empty(256, 50304).to(HALF), clusters=False)
    (start,), text = made.starts[0], made.text
    assert (start.threads, start.blocks, start.function.shared) == (512, 256, 50304 * 2)
    # A thread takes 13 turns, the last where there is one: all copies begin first, each is waited for.
    assert count(r"cp\.async\.cg\.shared\.global \S+ \S+ 16", text) == 13 and "ld.global" not in text
    assert [int(n) for n in re.findall(r"cp\.async\.wait_group (\d+)", text)] == [*range(13)][::-1]
    assert count(r"ld\.shared\.v4", text) == 2 * 13 and count(r"st\.global\.v4", text) == 13
    assert count(r"bar\.sync", text) == 1 and ".extern .shared" in text and ".minnctapersm 2" in text
    few = grid_of(lambda a: a.softmax(-1), torch.empty(128, 50304).to(HALF), clusters=False)
    assert few.team == 1024 and few.shared
    longer = grid_of(lambda a: a.softmax(-1), torch.empty(256, 100_000).to(HALF), clusters=False)
    assert (longer.turns, longer.shared) == (0, 0)


def test_rows_that_cannot_be_copied_at_once_are_put_into_shared_memory_by_threads():
    x = torch.empty(256, 50304, dtype=HALF)
    text = device_of(lambda a: a.softmax(-1), x, aligned=False, clusters=False).text
    assert "cp.async" not in text and count(r"st\.shared\.v4", text) == 13
    odd = device_of(lambda a: a.softmax(-1), torch.empty(256, 20001, dtype=HALF), clusters=False)
    assert (
        odd.starts[0][0].function.shared == 40016 and count(r"st\.shared\.b16", odd.text) == 4 + 40 % 16 // 2
    )


def test_what_a_norm_reads_once_is_not_kept():
    x, w = torch.empty(256, 32768, dtype=HALF), torch.empty(32768, dtype=HALF)
    made = device_of(lambda a, w: F.layer_norm(a, (32768,), w), x, w, clusters=False)
    (start,) = made.starts[0]
    assert start.function.shared == 32768 * 2
    assert count(r"cp\.async\.cg", made.text) == 8 == count(r"ld\.global\.nc\.v4", made.text)  # the weights


def test_products_and_sums_are_one_instruction_where_long_rows_of_halves_are_summed():
    x, w = torch.empty(256, 32768, dtype=HALF), torch.empty(32768, dtype=HALF)
    text = device_of(lambda a, w, b: F.layer_norm(a, (32768,), w, b), x, w, w.clone()).text
    assert count(r"fma\.rn\.f32", text) >= 2 * 64

    def largest(a, w):
        y = a.float() * w + 1.0
        return y.amax(-1).to(HALF), (y - y.amax(-1, keepdim=True)).to(HALF)

    assert not count(r"fma\.rn\.f32", device_of(largest, x, w).text)  # eager's bits may be asked for


def test_neighbouring_blocks_share_long_rows():
    made = device_of(lambda a: a.softmax(-1), torch.empty(256, 128256).to(HALF))
    (start,), text = made.starts[0], made.text
    assert (start.threads, start.blocks, start.function.shared) == (256, 8 * 256, 8 * 256 * 16)
    # Each copies its part once, and puts what it folded into the memory of all.
    assert ".reqnctapercluster 8" in text and count(r"cp\.async\.cg", text) == 8 and "ld.global" not in text
    # The largest and the sum go to all blocks at once, which wait for their bytes and for nothing else.
    assert count(r"st\.async\S*\.b32", text) == 2 and count(r"expect_tx\S* _, \S+ 512;", text) == 1
    assert count(r"barrier\.cluster\.wait", text) == 1 and "bar.sync" not in text
    few = grid_of(lambda a: a.softmax(-1), torch.empty(16, 50304).to(HALF))
    assert (few.members, few.turns) == (8, 2)  # in one stage


@pytest.mark.parametrize(
    ("columns", "rows", "team"), [(64, 8, 64), (96, 12, 32), (144, 18, 16), (24, 3, 128), (576, 24, 16), (296, 32, 16)]
)
def test_all_threads_have_columns_where_these_are_no_power_of_two(columns, rows, team):
    grid = grid_of(lambda x: x.float().sum(0), torch.empty(200_000, columns).to(HALF))
    assert (grid.width, grid.rows, grid.team) == (8, rows, team)


@pytest.mark.parametrize("columns", [22, 26, 34, 38, 46, 114, 136, 152, 168, 228, 232, 1064])
def test_blocks_have_at_most_1024_threads(columns):
    for rows in (900, 36_864, 500_000):
        grid = grid_of(lambda x: x.float().sum(0), torch.empty(rows, columns).to(HALF))
        assert 128 <= grid.threads <= 1024, grid


def test_rows_are_shared_where_processors_would_have_one_or_two():
    rows = {n: grid_of(lambda a: a.softmax(-1), torch.empty(n, 50304).to(HALF)) for n in (166, 256, 700)}
    assert [(g.members, g.team) for g in rows.values()] == [(8, 128), (1, 512), (1, 512)]
    alone = grid_of(lambda a: a.softmax(-1), torch.empty(65, 128256).to(HALF))
    assert (alone.members, alone.team, alone.shared) == (2, 512, 16 * 512 * 16)  # a block for each processor
    given = {n: [torch.empty(n, 50304).to(HALF) for _ in range(2)] for n in (166, 667)}
    gradients = {n: grid_of(softmax_gradient, *two) for n, two in given.items()}
    assert [(g.members, g.team) for g in gradients.values()] == [(8, 128), (2, 512)]


def test_what_comes_next_starts_when_a_long_row_is_read():
    """Blocks have so much memory that no processor takes more of them than others."""
    for columns, blocks, shared in ((32768, 256, 76800), (50304, 8 * 166, 18432)):
        made = device_of(lambda a: a.softmax(-1), torch.empty((16 << 20) // 2 // columns, columns).to(HALF))
        ((start,),) = made.starts
        assert (start.blocks, start.function.shared) == (blocks, shared)
        words = [made.text.index(word) for word in ("cp.async.wait_group 0", "launch_dependents", "st.global")]
        assert words == sorted(words)
        # Neighbouring blocks meet before they wait for what was started before them.
        assert (blocks > 256) == ("barrier.cluster.arrive" in made.text.split("griddepcontrol.wait")[0])


def test_threads_hold_fewer_elements_beside_weights_of_f32():
    def norm(a, w, b):
        return F.layer_norm(a, (a.shape[-1],), w, b)

    for columns, team, turns in ((4096, 512, 2), (1024, 128, 2), (768, 64, 3)):
        grid = grid_of(norm, torch.empty(4096, columns), torch.empty(columns), torch.empty(columns))
        assert (grid.team, grid.turns) == (team, turns)
    halves = [torch.empty(n, dtype=HALF) for n in ((8192, 1024), (1024,), (1024,))]
    assert grid_of(norm, *halves).team == 32


def test_every_other_row_begins_with_the_weights_that_were_read_last():
    x, w = torch.empty(256, 32768, dtype=HALF), torch.empty(32768, dtype=HALF)
    text = device_of(lambda a, w: F.layer_norm(a, (32768,), w), x, w).text
    assert count(r"selp\S*\s+\S+, \d+, \d+, ", text) >= 8


def test_teams_of_any_number_of_warps_fold_a_row():
    """Three warps read what all of them have, with nothing for warps that are not there."""
    x, each = torch.empty(20_000, 768, dtype=HALF), torch.rand(20_000, 1)
    text = device_of(norm_gradients, x, x.clone(), each, each.clone(), torch.empty(768, dtype=HALF)).text
    first = text.split(".entry")[1]
    # Threads of even numbers fold one sum, the others the other; each warp's are read at once.
    assert count(r"bar\.sync\s+%r\d+, 96", first) == 2 and count(r"shfl\.sync", first) == 5
    assert count(r"ld\.shared\.b32", first) == 0 and count(r"st\.shared\.b32", first) == 1
    # Products and sums are one instruction, and no 0 is added; the sums of columns come of the first reading.
    loop = first[first.index("wait_group 1") :]
    assert not count(r"add\S*f32\s+\S+, \S+, 0f00000000", loop) and not count(r"div\.", loop)
    assert count(r"fma\.rn\.f32", first) >= 8 * 4 and count(r"cvt\.f32\.bf16", first) == 8 * 3
    assert ".maxnreg 72" in first and ".maxntid 768" in first


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("rows", [1, 20, 300])
@pytest.mark.parametrize("f", [lambda a: a.sum(-1), lambda a: a.softmax(-1), lambda a: a.var(-1)])
def test_turns_that_are_written_out_cover_a_row(f, rows, clusters):
    for columns in (1000, 8976, 8712, 16384, 20001, 50304):
        grid = grid_of(f, torch.empty(rows, columns), clusters=clusters)
        if grid.along and grid.turns and grid.vector.size == columns:
            assert grid.turns * grid.team * grid.members * grid.width >= columns


def test_rows_are_held_without_what_is_one_for_many_of_their_elements():
    def norm(x, y, w, b):
        return F.group_norm(x + y * w.view(1, -1, 1, 1), 1, w, b)

    def inputs(kind):
        return [torch.empty(n).to(kind) for n in ((64, 64, 40, 40), (64, 64, 40, 40), (64,), (64,))]

    grid = grid_of(norm, *inputs(HALF))
    assert (grid.members, grid.shared) == (2, 2 * grid.part * 2)  # two tensors of two bytes
    (kernel,) = kernels_of(norm, *inputs(torch.float32))  # of which a row is more than eight blocks hold
    assert [len(nest.reduced) for nest in kernel.nests] == [2, 1, 0]


def test_few_long_rows_are_folded_in_one_stage():
    """Neighbouring blocks share them, where the second fold needs the first."""
    x = torch.empty(64, 128256, dtype=HALF)
    (start,) = device_of(lambda a: a.var(-1), x).starts[0]
    assert (start.threads, start.blocks) == (512, 2 * 64)
    (sums,) = kernels_of(lambda a: a.sum(-1), x)
    assert len(sums.stages) == 2  # one fold is cut into parts


def test_a_pair_of_blocks_meets_at_its_barrier():
    x = torch.empty(667, 50304, dtype=HALF)
    text = device_of(softmax_gradient, x, x.clone()).text
    assert ".reqnctapercluster 2" in text and "mbarrier" not in text
    assert count(r"barrier\.cluster\.wait", text) == 2


def test_gradients_of_norms_read_rows_once():
    x, each = torch.empty(2048, 4096, dtype=HALF), torch.rand(2048, 1)
    made = device_of(norm_gradients, x, x.clone(), each, each.clone(), torch.empty(4096, dtype=HALF))
    (first, second), text = made.starts[0], made.text.split(".entry")[1]
    assert (first.blocks, first.threads) == (128, 512) and second.threads * second.blocks <= 132 * 1024
    # Two teams of 256 threads, two turns along a row: the weights, and copies of two tensors, two rows before
    # the loop and one in each turn of it. One team waits for its own threads, and all once they have sums, which
    # the teams store by halves.
    assert count(r"ld\.global\.nc\.v4", text) == 2 and count(r"cp\.async\.cg", text) == 2 * 2 * 3
    assert count(r"bar\.sync\s+%r\d+, 256", text) == 1 and count(r"bar\.sync", text) == 1 + 2
    assert count(r"st\.global\.v4", text) in (9, 10) and first.function.shared == 2 * 2 * 4096 * 2 * 2


def test_strips_take_neighbouring_rows_in_turn():
    """What all processors read lies together; each has as many rows as another, or one team a row less."""
    x, each = torch.empty(20_001, 768, dtype=HALF), torch.rand(20_001, 1)
    text = device_of(norm_gradients, x, x.clone(), each, each.clone(), torch.empty(768, dtype=HALF)).text
    first = text.split(".entry")[1]
    # 132 strips take 16 rows in turn, nine times, and up to eight of those that are left over.
    assert count(r"mul\S+\s+\S+, \S+, 2112;", first) + count(r"mad\S+\s+\S+, \S+, 2112,", first)
    assert count(r"setp\S+\s+\S+, \S+, 14[34];", first) and count(r"bar\.sync\s+%r\d+, 96", first) == 2


def test_norms_ask_for_rows_while_what_comes_before_ends():
    """What is asked for comes to the second cache, and is read when that has ended."""
    x, w = torch.empty(4096, 4096), torch.empty(4096)

    def norm(a, r, w, b):
        return F.layer_norm(a + r, (4096,), w, b)

    before, after = device_of(norm, x, x.clone(), w, w.clone()).text.split("griddepcontrol.wait")
    assert count(r"prefetch\.global\.L2", before) == 2 * 2 and "prefetch" not in after and "ld.global" not in before
    assert "prefetch" not in device_of(norm, x, x.clone(), w, w.clone(), clusters=False).text
    assert "prefetch" not in device_of(lambda a: a.softmax(-1), x).text  # reads until its end


def test_older_architectures_wait_for_nothing_themselves():
    made = generate(kernels_of(lambda a: a + 1, torch.randn(64)), clusters=False)
    assert "griddepcontrol" in made.ptx((9, 0)) and "griddepcontrol" not in made.ptx((8, 0))


def test_quotients_are_one_instruction():
    for f in (F.silu, lambda a: F.gelu(a, approximate="tanh")):
        text = device_of(f, torch.empty(1 << 20, dtype=HALF)).text
        assert count(r"rcp\.approx\.ftz", text) == 8 and "div." not in text


def test_the_largest_and_the_sum_of_longer_rows_come_of_one_reading():
    def losses(a, i):
        return F.cross_entropy(a.float(), i, reduction="none")

    x, places = torch.empty(256, 50304, dtype=HALF), torch.zeros(256, dtype=torch.int64)
    grid = grid_of(losses, x, places)
    assert (grid.team, grid.turns, grid.shared) == (512, 13, 50304 * 2)
    text = device_of(losses, x, places).text  # all copies begin first, each is read once
    assert count(r"cp\.async\.cg", text) == 13 == count(r"ld\.shared\.v4", text)
    x = torch.empty(600, 128256, dtype=HALF)
    grid = grid_of(losses, x, places[:1].expand(600))
    assert (grid.team, grid.turns, grid.shared) == (256, 0, 0)
    text = device_of(losses, x, places[:1].expand(600)).text
    # Four turns at once and those that are left; the power of what the largest grew by is one for them all.
    assert count(r"ld\.global\.nc\.v4", text) <= 8 and count(r"ex2\.approx", text) <= 8 * 8 + 2 + 2 * 10


def test_a_thread_reads_twice_where_there_is_much_to_compute_for_little():
    made = device_of(lambda a: F.gelu(a, approximate="tanh"), torch.empty(1 << 24, dtype=HALF))
    (start,) = made.starts[0]
    assert start.blocks == (1 << 24) // 8 // 256 // 2 and count(r"ld\.global\.nc\.v4", made.text) == 2
    assert count(r"ex2\.approx", made.text) == 16 and count(r"fma\.rn\.f32", made.text) <= 16 * 4


def test_columns_are_folded_side_by_side():
    (kernel,) = kernels_of(lambda a: a.sum(0), torch.randn(20_000, 768))
    partial, final = (laid(nest) for nest in kernel.nests)
    assert len(kernel.stages) == 2 and not partial.along and partial.width == 4 and partial.rows == 32
    assert (final.width, final.rows, final.threads) == (1, 8, 256)  # blocks for all processors
    text = device_of(lambda a: a.sum(0), torch.randn(20_000, 768)).text
    assert count(r"ld\.shared\.v4", text) and count(r"ld\.global\.nc\.v4", text)


def test_a_thread_takes_the_turns_of_a_recurrence_in_order():
    x, factor = torch.randn(2, 48, 21, 16), torch.rand(2, 48, 21, 16)
    ((started,),) = device_of(lambda x, f: torch.ops.kiln.recurrence(x * 2, 2, f) + 1, x, factor).starts
    assert started.threads * started.blocks == 2 * 48 * 16
    assert started.function.text.count("call float @llvm.fma") == 8 + 21 % 8
    varying = device_of(lambda x, f: torch.ops.kiln.recurrence(x, 1, f), x[0], factor[0], dynamic=True)
    ((started,),) = varying.starts
    assert started.function.text.count("call float @llvm.fma") == 8 + 1
    before = started.function.text.split("store float", 1)[0]
    assert before.count("= load float") == 2 * 8  # of all turns that are written out, before the first result


def test_what_is_transposed_is_turned_in_shared_memory():
    made = device_of(lambda a: a.t().contiguous(), torch.randn(256, 512))
    assert made.starts[0][0].blocks == 8 * 16 and "ld.shared" in made.text and "bar.sync" in made.text


def test_sizes_that_vary_are_parameters():
    made = device_of(lambda a: F.gelu(a) + a.shape[0], torch.randn(33, 64), dynamic=True)
    (start,) = made.starts[0]
    assert "s0" in str(start.blocks) and any(str(g) == "s0" for g in start.given)
    assert count(r"ld\.global\.nc\.v4", made.text) or count(r"ld\.global\.nc\.b32", made.text)


def test_indices_outside_end_the_program_of_the_device():
    text = device_of(lambda i, w: F.embedding(i, w), torch.randint(0, 9, (64,)), torch.randn(9, 64)).text
    assert "call.uni __assertfail" in text and count(r"ld\.global\.nc\.v4", text) == 1


def test_functions_use_the_hardware():
    text = device_of(lambda a: F.gelu(a) + a.sigmoid(), torch.randn(64, 256)).text
    assert "ex2.approx.ftz.f32" in text and "rcp.approx" in text and "div.rn" not in text
    assert count(r"fma\.rn\.f32", text) < 4 * 20


def test_divisions_of_indices_are_of_32_bits():
    text = device_of(lambda a, b: a + b, torch.randn(30, 7, 64), torch.randn(30, 1, 64)).text
    assert not count(r"(div|rem|mul\.hi)\.[su]64", text)


def test_divisions_are_of_32_bits_where_elements_are_many():
    rows = torch.empty(1024, 30528, dtype=HALF)  # products over padded rows
    made = device_of(lambda a: a[:, :30522].clone(memory_format=torch.contiguous_format) + 1, rows)
    assert not count(r"(div|rem|mul\.hi)\.[su]64", made.text) and count(r"mul\.hi\.u32", made.text) == 4


def test_equal_nests_share_a_function():
    def f(a, b):
        return a.sum(0) * 2, b.sum(0) * 2

    made = device_of(f, torch.randn(64, 96), torch.randn(64, 96))
    assert len({start.function for starts in made.starts for start in starts}) == 1


def test_sums_of_16_bits_are_taken_one_by_one():
    def f(x):
        return (F.pad(x, (1, 0), value=7) % 5).sum(-3)

    text = device_of(f, torch.ones(6, 3, 1, dtype=torch.int16)[::2]).text
    assert "s16x2" not in text and "16" in text


def test_every_architecture_has_a_version():
    assert {(8, 0), (9, 0)} <= VERSIONS.keys()


def test_what_is_read_under_a_condition_is_read_at_once_where_it_holds_for_a_thread():
    """Borders between the elements of two threads are asked once; elsewhere all lanes are."""

    def halves(x):
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    text = device_of(halves, torch.randn(64, 128).to(HALF)).text
    assert count(r"ld\.global\S*\.v4", text) == 2 and not count(r"ld\.global\S*\.[bu]16", text)
    text = device_of(lambda x: F.pad(x * 2, (0, 7)), torch.randn(64, 64).to(HALF)[:, :57]).text
    assert count(r"ld\.global\S*\.[bu]16", text) == 8 and count(r"ld\.global\S*\.v4", text) == 1


def test_batch_norms_over_channels_side_by_side_are_cut_for_all_processors():
    """Images and places are one fold, in parts; a block for each of them."""
    x = torch.randn(16, 256, 28, 28).to(HALF).to(memory_format=torch.channels_last)
    kernels = device_of(lambda x: x.float().sum((0, 2, 3)), x).starts
    (first, *_), *_ = kernels
    assert first.blocks >= 64, first.blocks


def test_short_kernels_over_the_same_loops_are_one():
    def both(a, b):
        return a * 2 + 1, b.exp()

    short = device_of(both, torch.randn(64), torch.randn(64))
    assert [len(starts) for starts in short.starts] == [1] and count(r"st\.global", short.text) == 2
    long = device_of(both, torch.randn(1 << 20), torch.randn(1 << 20))
    assert sum(map(len, long.starts)) == 2


def test_a_mask_of_few_elements_is_made_where_it_is_read():
    def loss(x, i):
        return F.cross_entropy(x.float(), i)

    x, i = torch.randn(300, 5000, dtype=HALF, requires_grad=True), torch.zeros(300, dtype=torch.int64)
    kiln.reset()
    with kernels_noted() as found:
        kiln.compile(loss, fullgraph=True)(x, i).backward()
    *_, before, gradient = found
    assert (len(before.stages), len(gradient.stages)) == (1, 1)
    assert [len(starts) for starts in generate([before, gradient]).starts] == [1, 1]


def mean_loss(a, i):
    return F.cross_entropy(a.float(), i)


def test_all_of_a_row_that_is_read_once_is_under_way_at_once():
    x, places = torch.empty(262, 32000, dtype=HALF), torch.zeros(262, dtype=torch.int64)
    made = device_of(lambda a, i: F.cross_entropy(a.float(), i, reduction="none"), x, places)
    ((start,),) = made.starts
    assert (start.blocks, start.threads) == (262, 512) and ".minnctapersm 3" in made.text
    assert count(r"cp\.async\.cg", made.text) == 8 == count(r"ld\.shared\.v4", made.text)
    # The one that is asked for is read at its place as soon as that is there, not when all else is.
    words = re.findall(r"wait_group \d|ld\.global\S*\.b16", made.text)
    assert [w for w in words if "wait" in w] == [f"wait_group {7 - n}" for n in range(8)] and "b16" in words[1]


def test_few_powers_are_taken_where_parts_of_a_row_are_brought_together():
    """Threads know the largest of a warp, then that of the warps, before they scale what they have."""
    x, places = torch.empty(140, 24576, dtype=HALF), torch.zeros(140, dtype=torch.int64)
    made = device_of(mean_loss, x, places)
    parts, ends = made.text.split(".entry")[1:]
    ((first, second),) = made.starts
    assert (first.blocks, first.threads) == (280, 256) and second.blocks == 1
    # Nine for each turn, one for what it adds to; one for a warp and one for the block.
    assert count(r"ex2\.approx", parts) == 6 * 9 + 1 + 1
    assert count(r"shfl\.sync", parts) == 2 * 5 + 2 * 3 and count(r"bar\.sync", parts) == 1
    assert count(r"ld\.global", ends) == 2 * 2 + 1 + 2  # two parts, the one asked for, places
    assert ".local" not in made.text


def test_copies_for_gradients_are_written_as_parts_are_read():
    x, places = torch.empty(264, 24576, dtype=HALF).requires_grad_(), torch.zeros(264, dtype=torch.int64)
    made = device_of(mean_loss, x, places)
    parts, ends = made.text.split(".entry")[1:3]
    assert count(r"cp\.async\.cg", parts) == 6 == count(r"ld\.shared\.v4", parts) == count(r"st\.global\.v4", parts)
    assert "ld.global.nc.v4" not in parts and ".local" not in made.text
    assert re.findall(r"wait_group (\d)", parts) == ["4", "2", "0"]  # two turns at once


def test_copies_in_single_elements_are_not_stored_by_those_that_read_a_row_once():
    def scores_and_losses(a, i):
        scores = a.clone()
        return scores, F.cross_entropy(scores.float(), i, reduction="none")

    places = torch.zeros(64, dtype=torch.int64)
    for words, once in ((30528, True), (30522, False)):
        (kernel,) = kernels_of(scores_and_losses, torch.empty(64, words, dtype=HALF), places)
        (nest,) = [nest for nest in kernel.nests if nest.folds()]
        assert any(not store.kept for store in nest.stores) and read_once(nest) == once
