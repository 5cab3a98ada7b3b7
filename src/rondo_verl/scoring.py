"""verl's own scoring: which rule a row's `data_source` has, and the rules. Each does what verl 0.6.1 and its
main branch of 2026 do (`verl.utils.reward_score`, one module for each rule), to the last case.

Rules are pure functions of the response and the row's ground truth. Two are not here: code runs in rondo's
sandbox, and geometry3k is compared by the package that verl calls.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from typing import Any

from rondo.core.errors import DataError
from rondo.core.types import Prompt, Trajectory
from rondo.rewards.answers import final_answer
from rondo.rewards.marks import reward_function
from rondo.rewards.verl import ACCURACY, SOURCE, TRUTH, check_row, response_of

_TAIL = 300  # characters at the end that gsm8k and math_dapo look at
_CODE = ("codecontests", "apps", "codeforces", "taco")
_GEOMETRY = "hiyouga/geometry3k"
_PRIME_MATH = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
_SEARCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")


def _check(prompt: Prompt) -> None:
    """Raises DataError for a row that verl has no rule for, or whose rule or ground truth is not here."""
    check_row(prompt)
    source, truth = str(prompt.column(SOURCE)), prompt.column(TRUTH)
    about, own = f"prompt {prompt.prompt_id}, data_source {source!r}", "custom_reward_function.path=FILE.py"
    if source in [f"numina_{one}" for one in _PRIME_MATH]:
        raise DataError(
            f"{about}: verl scores it by prime_math, which is not here. Take reward.functions=[{{name: math, "
            f"answer_key: {TRUTH}}}], which compares by math-verify, a function of your own ({own}), or the "
            "row out"
        )
    if _chosen(prompt) is None and _rule(source) is None:
        raise DataError(
            f"{about}: verl has no rule for it (NotImplementedError there). Its rules are for "
            f"{', '.join([*_RULES, 'aime…', *_CODE, _GEOMETRY])}. Write a function of your own ({own})"
        )
    if source.startswith("searchR1_"):
        targets = truth.get("target") if isinstance(truth, Mapping) else None
        right = isinstance(targets, str) or (
            isinstance(targets, list | tuple)
            and bool(targets)
            and all(isinstance(one, str) for one in targets)
        )
        wanted = "{target: text or texts}"
    else:
        right, wanted = truth is not None and (source in _CODE or isinstance(truth, str)), "a text"
    if not right:
        raise DataError(f"{about}: its ground truth ({TRUTH}) must be {wanted}, got {truth!r:.80}")


def _check_row(prompt: Prompt, **_: Any) -> None:
    _check(prompt)


def _chosen(prompt: Prompt, **_: Any) -> Mapping[str, Any] | None:
    """Returns the scorer of rows that are scored elsewhere. The share of the first ten cases is verl's."""
    source = prompt.column(SOURCE)
    if source in _CODE:
        return {"name": "code", "cases_key": TRUTH, "max_cases": 10}
    return {"name": "rondo_verl.scoring:geometry3k"} if source == _GEOMETRY else None


def _voted(text: str, **_: Any) -> str | None:
    """Returns what math_dapo calls `pred`; of a response without such a line what rondo counts elsewhere."""
    found = _answered(text)
    return final_answer(text) if found is None else _of_minerva(found)


@reward_function(
    run_in="loop", score_names=[ACCURACY], answer=_voted, row=_check_row, chooses=_chosen, verl=True
)
def verl(prompt: Prompt, trajectory: Trajectory) -> dict[str, float]:
    """verl's own rule for the row's `data_source`, on rows of its format. `acc` is what verl reports as
    accuracy: 1 or 0 of math_dapo, whose reward is 1 or -1, and the reward itself of all others.
    """
    _check(prompt)
    rule = _rule(str(prompt.column(SOURCE)))
    assert rule is not None, "the scorer that was chosen is called in its place"
    score = rule(response_of(trajectory), prompt.column(TRUTH))
    return {"reward": score, ACCURACY: max(score, 0.0)}


# ---- rules


def gsm8k(response: str, truth: str) -> float:
    """1 where the last `#### number` of the last 300 characters, without commas, is the ground truth, letter
    by letter (verl's gsm8k, strict).
    """
    found = re.findall(r"#### (-?[0-9.,]+)", response[-_TAIL:])
    return float(bool(found) and found[-1].replace(",", "") == truth)


def hendrycks_math(response: str, truth: str) -> float:
    r"""1 where the last `\boxed{…}` is the ground truth, both normalised as in Hendrycks et al., 2021
    (verl's math_reward).
    """
    answer = _last_box(response)
    if answer is None:
        return 0.0
    try:
        return float(_of_hendrycks(answer) == _of_hendrycks(truth))
    except ValueError:  # then verl compares what was written
        return float(answer == truth)


def _last_box(text: str) -> str | None:
    """Returns what verl finds in the last box. `\\boxed 5$` is one, too, and goes before all with braces."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed")
    if not text.startswith("\\boxed{", start) or start < 0:
        return None
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start + len("\\boxed{") : start + brace.start()]
    return None


_OF_HENDRYCKS = (
    *(("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")),
    *(("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")),
)


def _of_hendrycks(text: str) -> str:
    """Normalises an answer. Raises ValueError where verl's code breaks off."""
    for old, new in _OF_HENDRYCKS:
        text = text.replace(old, new)
    text, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise ValueError("several units")
    text = text.replace("\\\\%", "").replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = f"0{text}" if text[0] == "." else text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    head, *roots = text.split("\\sqrt")
    text = "".join([head, *(f"\\sqrt{_braced(root, 1)}" for root in roots)]).replace(" ", "")
    text = _with_fractions(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    found = re.fullmatch(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)", text)
    return f"\\frac{{{found[1]}}}{{{found[2]}}}" if found else text


def _with_fractions(text: str) -> str:
    made, *parts = text.split("\\frac")
    for part in parts:
        if len(part) == 1 and part != "{":  # half a fraction: then verl leaves all of them
            return text
        made += f"\\frac{_braced(part, 2)}"
    return made


def _braced(text: str, most: int) -> str:
    """Puts braces around the first letters, up to `most` and to one that opens a brace itself."""
    if not text:
        raise ValueError("nothing behind a command")
    made = ""
    while most and text[:1] != "{":
        made, text, most = f"{made}{{{text[0]}}}", text[1:], most - 1
    return made + text


_OF_MINERVA = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_UNITS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue"),
    *("points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals"),
    *("edges", "students", "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}"),
    *("\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;"),
    *(",\\!", "{,}", '"', "\\dots"),
)


def math_dapo(response: str, truth: str) -> float:
    """1 where what follows the last `Answer:` of the last 300 characters, to the end of its line, is the
    ground truth, both normalised as in Lewkowycz et al., 2022 (Minerva, appendix D), else -1 (verl's
    math_dapo).
    """
    found = _answered(response)
    return 1.0 if _of_minerva("[INVALID]" if found is None else found) == _of_minerva(truth) else -1.0


def _answered(response: str) -> str | None:
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", response[-_TAIL:])
    return found[-1] if found else None


def _of_minerva(text: str) -> str:
    text = text.rpartition("=")[2]
    for old, new in (*_OF_MINERVA, *((unit, "") for unit in _UNITS)):
        text = text.replace(old, new)
    text = re.sub(r".*?\$(.*?)\$.*", r"$\1$", text)
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def search_match(response: str, truth: Mapping[str, Any]) -> float:
    """1 where the last <answer>…</answer> is one of the targets, compared as SQuAD does: without case,
    punctuation and articles; a quarter with more than ten such tags (verl's search_r1_like_qa_em).
    """
    answer, start = None, response.find("<answer>")
    while start >= 0 and (stop := response.find("</answer>", start)) >= 0:
        answer = response[start + len("<answer>") : stop]
        start = response.find("<answer>", stop)
    targets = truth["target"]
    accepted = [targets] if isinstance(targets, str) else targets
    if answer is None or _of_squad(answer) not in map(_of_squad, accepted):
        return 0.0
    return 0.25 if max(response.count("<answer>"), response.count("</answer>")) > 10 else 1.0


def _of_squad(text: str) -> str:
    text = text.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _read_truth(prompt: Prompt, **_: Any) -> str:
    return str(prompt.column(TRUTH))


@reward_function(
    run_in="process",
    requires=("mathruler", "rondo-rl[verl]"),
    memory_bytes=4 << 30,  # sympy simplifies the difference of two answers
    reference=_read_truth,
)
def geometry3k(prompt: Prompt, trajectory: Trajectory) -> float:
    r"""0.9 where the last `\boxed{…}` is the ground truth to mathruler, and 0.1 where the response is
    `<think>…</think>…\boxed{…}…` (verl's geo3k).
    """
    from mathruler.grader import extract_boxed_content, grade_answer

    response = response_of(trajectory)
    right = grade_answer(extract_boxed_content(response), _read_truth(prompt))
    return 0.9 * bool(right) + 0.1 * thought_first(response)


def thought_first(response: str) -> bool:
    """Says whether a response is thoughts, from its first letter on, and a box behind them."""
    place = 0
    for part in ("<think>", "</think>", "\\boxed{", "}"):
        found = response.find(part, place)
        if found < 0 or (place == 0 and found > 0):
            return False
        place = found + len(part)
    return True


_RULES: Mapping[str, Callable[[str, Any], float]] = {
    "openai/gsm8k": gsm8k,
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), hendrycks_math
    ),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), math_dapo),
    **{f"searchR1_{one}": search_match for one in _SEARCH},
}


def _rule(source: str) -> Callable[[str, Any], float] | None:
    return math_dapo if source.startswith("aime") else _RULES.get(source)
