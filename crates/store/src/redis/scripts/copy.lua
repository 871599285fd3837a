local _, from, wanted, to, etag, mark, words = unpack(ARGV)
local there = look(to)
if there == nil then return 'other' end
if etag_of(there) == etag then return 'done' end
local source = look(from)
if not source then return 'missing' end
if wanted ~= '' and etag_of(source) ~= wanted then return 'condition' end
local crc, said = source:match('^%S+ %S+ %d+ %d+ (%S+) (.*)$')
if from ~= to then redis.call('COPY', P .. from, P .. to, 'REPLACE') end
keep(to, etag, mark, crc, words == '' and said or words)
return 'ok'
