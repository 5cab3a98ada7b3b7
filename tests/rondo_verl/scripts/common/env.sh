# Sourced by others.
COMMON_ARGS=(
    algorithm.adv_estimator=grpo
    actor_rollout_ref.model.path=$MODEL_ROOT/tiny
)
pip install -q -r requirements.txt
