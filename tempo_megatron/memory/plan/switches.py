"""Points to compare a plan with: the plans for other budgets, and runs with one switch on."""

from __future__ import annotations

from tempo_megatron.memory.plan.planner import RECOMPUTE_MODES, Plan, Planner, PlanRequest, plan_alike
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS
from tempo_megatron.settings.operations import OPERATIONS


def list_plans(request: PlanRequest, num_budgets: int) -> list[Plan]:
    """The plans of budgets from the least that fits to what stock needs, each plan once."""
    planner = Planner(request)
    least, most = planner.make_smallest().peak_bytes, list_switches(request)["stock"].peak_bytes
    plans: list[Plan] = []
    for index in range(num_budgets):
        solution = planner.solver.solve(least + (most - least) * index // (num_budgets - 1))
        assert solution is not None
        plan = planner.describe(solution)
        if not plans or plan.seconds < plans[-1].seconds:
            plans.append(plan)
    return plans


def list_switches(request: PlanRequest) -> dict[str, Plan]:
    """What single switches come to, whatever the budget: stock, Tempo's two forms, and Megatron's recomputation."""
    preferences = {
        "stock": (),
        "Tempo, in place": ("inplace", "flash", "recompute"),
        "Tempo, recompute": ("flash", "recompute"),
    }
    plans = {}
    for name, preference in preferences.items():
        values = {
            operation: (next((value for value in preference if value in allowed), "off"),)
            if not OPERATIONS[operation].is_opt_in
            else ("off",)
            for operation, allowed in request.values.items()
            if operation != "loss"
        }
        # In place exists for some activations only; "recompute" is not what that switch means there.
        if name == "Tempo, in place" and "inplace" not in request.values["activation"]:
            values["activation"] = ("off",)
        plans[name] = plan_alike(request, values, ())
    off = dict.fromkeys(LAYER_OPERATIONS, ("off",))
    for modules in RECOMPUTE_MODES[1:]:
        if request.recompute.issuperset(modules):
            plans[f"stock + {' '.join(modules)}"] = plan_alike(request, off, modules)
    return plans
