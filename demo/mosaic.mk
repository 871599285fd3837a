# A mosaic of overlapping frames by Debian's Montage: project, compare each pair, make the backgrounds agree, add.
#
#   make -f /path/to/mosaic.mk -j2          in a directory that `frames` filled
#
# The shape of an ordinary imaging workflow: many small files, most of which are read again. A projected frame is read once for
# each neighbour, and again at the end. The workflow runs in any directory, uses Montage's own programs unmodified, and does not
# know where its files are stored. The same frames give the same bytes every time.

FRAMES     := $(notdir $(wildcard raw/*.fits))
CONCAT_FIT := $(dir $(lastword $(MAKEFILE_LIST)))../bench/workloads/tasks/concat_fit.py
# Montage's programs report on standard output, failures included.
SAID = | { read -r said; case $$said in *'stat="ERROR"'*) echo "$$said" >&2; exit 1 ;; esac; }

all: mosaic.png

raw.tbl: frames.tbl
	@mImgtbl -t frames.tbl raw $@ $(SAID)

region.hdr: raw.tbl
	@mMakeHdr raw.tbl $@ $(SAID)

projected/%.fits: raw/%.fits region.hdr | projected
	@mProjectPP $< $@ region.hdr $(SAID)

projected.tbl: $(FRAMES:%=projected/%)
	@mImgtbl -t frames.tbl projected $@ $(SAID)

diffs.tbl: projected.tbl
	@mOverlaps projected.tbl $@ $(SAID)

# The overlapping pairs are known only after projection: make builds this included file, and reads the makefile again.
pairs.mk: diffs.tbl
	@awk '$$1 ~ /^[0-9]/ { name = $$5; sub(/\.fits$$/, "", name); print "PAIRS += " name; \
	  print "diff/" $$5 ": projected/" $$3 " projected/" $$4 }' diffs.tbl >$@
include pairs.mk

diff/%.fits: | diff
	@mDiff $(filter projected/%,$^) $@ region.hdr $(SAID)

fit/%.txt: diff/%.fits | fit
	@mFitplane -s $@ $< $(SAID)

fits.tbl: $(PAIRS:%=fit/%.txt)
	@python3 $(CONCAT_FIT) diffs.tbl fit $@

corrections.tbl: fits.tbl
	@mBgModel projected.tbl fits.tbl $@ $(SAID)

# (Its table names files without their folder.)
corrected/%.fits: projected/%.fits corrections.tbl | corrected
	@cd projected && mBackground -t $*.fits ../$@ ../projected.tbl ../corrections.tbl $(SAID)

corrected.tbl: $(FRAMES:%=corrected/%)
	@mImgtbl -t frames.tbl corrected $@ $(SAID)

mosaic.fits: corrected.tbl
	@mAdd -p corrected corrected.tbl region.hdr $@ $(SAID)

shrunk.fits: mosaic.fits
	@mShrink $< $@ 2 $(SAID)

mosaic.png: shrunk.fits
	@mViewer -ct 4 -gray $< 1% 99.7% gaussian-log -png $@ $(SAID)

projected diff fit corrected:
	@mkdir -p $@

.PHONY: all
# Every intermediate file is kept, and never left half-written.
.SECONDARY:
.DELETE_ON_ERROR:
