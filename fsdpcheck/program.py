"""What every rank runs, on every engine: build the model a case describes, shard it, take its steps, record.

Moments: after_init, then in each step those the implementation announces (Setup.notify), then after_step.
"""
# Contract (to be implemented): rank_program(request: RunRequest, rank: int, device: torch.device) -> RankResult
