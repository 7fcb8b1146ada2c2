"""What was measured on GPUs: mean completion time of eight-turn programs, in seconds.

The published sweep: Llama 3.1 8B in bf16, vLLM 0.10 and forks of its time, seed 42, programs per
second (JPS) 1 to 15; `large DRAM` runs of 2026-04-12. What was not published is left out. And the
machine of our own runs of its programs, with vLLM 0.26.0 (bench/results/gpu.json).
"""

from __future__ import annotations

from bench.sim.job import Plain

Table = dict[str, dict[int, float]]  # GPU -> JPS -> seconds

FCFS: Table = {
    "H200": {1: 8.55, 3: 28.11, 6: 192.15, 10: 416.92, 15: 702.50},
    "H100": {1: 9.01, 3: 68.85, 6: 244.07, 10: 456.30, 15: 739.24},
    "A100-40": {1: 45.00, 3: 415.14, 6: 943.54},
    "L40S": {1: 134.55, 3: 501.28, 6: 1045.63, 10: 1834.86, 15: 3374.62},
}
CONTINUUM: Table = {
    "H200": {1: 8.67, 3: 20.67, 6: 66.00, 10: 119.39, 15: 185.08},
    "H100": {1: 8.75, 3: 39.75, 6: 100.38, 10: 172.89, 15: 259.52},
    "L40S": {1: 68.55},
}
# Mean seconds of a program's first and last turn: policy -> JPS -> (turn 1, turn 8), H200 only.
ENDS = {
    "FCFS": {3: (1.461, 3.118), 6: (6.804, 30.812), 10: (16.019, 72.917), 15: (21.347, 133.549)},
    "Continuum": {3: (0.933, 2.307), 6: (17.877, 4.878), 10: (19.940, 5.237), 15: (27.922, 5.225)},
}
# Of Continuum's second turn, the spike: GPU -> JPS -> seconds.
SECOND_TURN: Table = {"H200": {10: 54.9, 15: 110.6}, "H100": {6: 34.5, 10: 85.9, 15: 155.5}}
# What LMCache was given there, in GB.
DRAM_GB = {"H200": 400, "H100": 400, "A100-40": 200, "L40S": 100}

OUR_WINDOW_S = {2: 20, 3: 15}  # JPS -> seconds in which programs arrive
OUR_MACHINE: dict[str, Plain] = {
    "gpu": "H200",
    "kv_tokens": 159_984,  # 10,000 blocks of 16, less vLLM's null block
    "block_size": 16,
    "dram_gb": 27.917287424,  # 26 GiB
}
