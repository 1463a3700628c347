-- Which tables are there, and which columns has each?
-- title: Tables and columns
SELECT table, arrayStringConcat(groupArray(concat(name, ' ', type)), ', ') AS columns
FROM (SELECT table, name, type FROM system.columns WHERE database = currentDatabase() ORDER BY table, position)
GROUP BY table
ORDER BY table
