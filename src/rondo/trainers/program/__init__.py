"""What one trainer step computes: roles, inputs, stages, updates. Nothing here waits for an episode."""

# ruff: noqa: F401
from rondo.planning import engine_of, parallel_of, placement_of, reference_in_actor
from rondo.trainers.program.advantages import AdvantageStage
from rondo.trainers.program.given import (
    check_pictures,
    completion_of,
    images_of,
    prompt_of,
    prompts_that_show,
)
from rondo.trainers.program.inputs import (
    Prompts,
    Recorded,
    checked_mixer,
    checked_sampler,
    comparing,
    complete_model,
    conversations,
    load_prompts,
    longest_row,
    notes_on_tokenizers,
    open_tokenizer,
    sampling_params,
    settled,
    stops_of,
    tool_schemas,
)
from rondo.trainers.program.mixing import Mixing, given_rows
from rondo.trainers.program.plan import (
    Program,
    Schedule,
    check_named_models,
    columns_of_hooks,
    corrected,
    critic_learner,
    describe_correction,
    plan_program,
    plan_schedule,
    schedule_of,
    warmup_steps,
)
from rondo.trainers.program.roles import (
    as_policy,
    check_parallel,
    check_profile,
    create_model,
    create_rollout,
    engine_spec,
    head_notes,
    head_of,
    model_source,
    on_one_pool,
    path_of,
    planned_weights,
    positions_of,
    rollout_spec,
    source_of,
    tokenizer_source,
)
from rondo.trainers.program.stages import (
    CorrectionStage,
    PreparationStage,
    Resampling,
    RewardModelScores,
    SeesImages,
    Selection,
    columns_of_loss,
    model_scores,
)
from rondo.trainers.program.step import (
    KL,
    LEARNT_PAIRS,
    LEARNT_TOKENS,
    MULTIPLIER,
    Coefficients,
    Roles,
    Stage,
    Step,
    count_rows,
    with_scores_of,
    with_tokens,
)
from rondo.trainers.program.update import (
    ActorWeights,
    Learner,
    LearnerUpdate,
    MiniBatches,
    Pretraining,
    update_actor,
)
