"""Continue a run of `squares.yaml` in plain torch, with its optimizer's state.

lockstep export RUN --format torch --with optimizer --to model.pt
python examples/continue_in_torch.py
"""

from __future__ import annotations

import torch
from squares import Curve

model = Curve()

content = torch.load("model.pt", weights_only=True)
model.load_state_dict(content["model_state_dict"])
named, saved = dict(model.named_parameters()), content["optimizer_state_dict"]
groups = [{"params": [named[name] for name in group["param_names"]]} for group in saved["param_groups"]]
optimizer = torch.optim.AdamW(groups)
optimizer.load_state_dict(saved)

print(f"continues after step {content.get('step')}, at a learning rate of {optimizer.param_groups[0]['lr']}")
