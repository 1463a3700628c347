-- Which share of each arm's interactions has a signal, by kind, and which share has none?
WITH
    answers AS (SELECT * FROM interactions ORDER BY _offset LIMIT 1 BY run_id, interaction_id),
    events AS (SELECT * FROM feedback ORDER BY _offset LIMIT 1 BY interaction_id, event_id)
SELECT
    a.run_id AS run_id,
    a.arm AS arm,
    if(e.event_id = '', 'none', toString(e.kind)) AS signal,
    uniqExact(a.interaction_id) AS interactions,
    round(interactions / any(t.total), 4) AS share,
    countIf(e.event_id != '') AS events,
    countIf(e.corrects IS NOT NULL) AS corrections,
    round(avgOrNullIf(e.value, e.event_id != ''), 4) AS mean_value
FROM answers AS a
LEFT JOIN events AS e ON e.interaction_id = a.interaction_id
INNER JOIN (SELECT run_id, arm, count() AS total FROM answers GROUP BY run_id, arm) AS t
    ON t.run_id = a.run_id AND t.arm = a.arm
GROUP BY run_id, arm, signal
ORDER BY run_id, arm, signal
