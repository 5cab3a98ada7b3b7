"""A page in the browser that shows runs: curves, rollouts, tokens, groups, evaluations, the devices' time.

    command ──▶ server ──▶ views ──▶ index (rollouts), rondo.tracking (all else)
                  └─▶ page/ (HTML, CSS, JavaScript; charts by plotly, from its wheel)

The page is of this machine only, and only reads.
"""
