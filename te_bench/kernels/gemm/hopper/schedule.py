"""Which tiles of D, and which blocks of K, a program of the Gluon GEMM makes: a position counts steps over all tiles."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tile_origin(index, tiles_m, tiles_n, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, GROUP_M: gl.constexpr):
    """The first row and column of a tile: GROUP_M tiles down, then one to the right."""
    group = index // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    within = index % (GROUP_M * tiles_n)
    return (first + within % height) * HEIGHT, (within // height) * WIDTH


@gluon.jit
def steps_of_program(sizes, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, BLOCK_K: gl.constexpr, STREAM: gl.constexpr):
    """tiles_m, tiles_n, blocks of K, and the program's share of the steps, tile after tile and block after block.

    STREAM: all shares are alike, and may begin and end within a tile. Else they are of whole tiles, and of every
    num_programs-th: `end` is that of the last.
    """
    M, N, K = sizes
    tiles_m, tiles_n, blocks = gl.cdiv(M, HEIGHT), gl.cdiv(N, WIDTH), gl.cdiv(K, BLOCK_K)
    program, programs, tiles = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n
    if STREAM:
        each, more = tiles * blocks // programs, tiles * blocks % programs
        start = program * each + min(program, more)
        end = start + each
        if program < more:
            end += 1
    else:
        start, end = program * blocks, tiles * blocks
    return tiles_m, tiles_n, blocks, start, end


@gluon.jit
def steps_in_tile(position, end, blocks):
    """How many steps from there on are of the same tile, none of them beyond the end."""
    return max(min(blocks - position % blocks, end - position), 0)


@gluon.jit
def next_position(position, length, blocks, STREAM: gl.constexpr):
    """Where the step after a stretch of `length` is."""
    if STREAM:
        return position + length
    else:
        return position + gl.num_programs(0) * blocks
