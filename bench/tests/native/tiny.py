"""So little that every section of bench/copy_engine runs in a moment."""

from __future__ import annotations

from bench.copy_engine.sizes import KIB, MIB, Sizes

TINY = Sizes(
    blocks=(1, 8),
    regions=(1, 4),
    calls=4,
    steps=3,
    step_s=0.002,
    handed_blocks=8,
    handed_bytes=4 * KIB,
    chunks=(4 * KIB, 64 * KIB),
    repeats=1,
    peak_bytes=MIB,
    counts=(4,),
    sweep_bytes=MIB,
    fed_s=0.02,
    work_units=4,
    arm_s=0.005,
    decode_bytes=MIB,
    small_pieces=(4 * KIB,),
    small_pieces_per_block=4,
    page_bytes=MIB,
    page_layers=4,
    page_piece=4 * KIB,
    pool_bytes=4 * MIB,
    pool_chunks=(MIB,),
)
