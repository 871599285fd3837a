# Terrain parameters of an elevation model: slope, aspect and shaded relief, tile by tile.
#
#   make -f /path/to/terrain.mk -j2 DEM=dem.tif
#
# The shape of an ordinary earth-science workflow: scatter (crop into tiles with a margin), compute
# (gdaldem on every tile), trim the margins, gather (mosaic), picture. It runs in any directory, uses
# GDAL's own programs unmodified, and does not know where its files are stored.
# The same DEM gives the same bytes every time.

DEM    ?= dem.tif
# TILES × TILES pieces; gdaldem looks one pixel beyond a tile, so any margin ≥ 1 gives a seamless mosaic.
TILES  ?= 4
MARGIN ?= 16

PRODUCTS := slope aspect hillshade
STEPS    := $(shell seq 0 $$(($(TILES) - 1)))
GRID     := $(foreach row,$(STEPS),$(foreach column,$(STEPS),$(row)-$(column)))
SIZE     := $(shell gdalinfo $(DEM) | sed -n 's/^Size is \([0-9]*\), \([0-9]*\)$$/\1 \2/p')
ifeq ($(SIZE),)
$(error cannot read the size of $(DEM): give an elevation model that GDAL reads, DEM=FILE)
endif
# GDAL's tiled layout; uncompressed, as fast local post-processing usually keeps it.
TIFF     := -q -co TILED=YES

# "$(call window,0-3)" prints the tile's place in the model as shell words:
# x y width height of the tile itself, then left, top, right and bottom margins that fit inside the model.
define window
set -eu; tile=$(1); row=$${tile%-*}; column=$${tile#*-}; \
columns=$(word 1,$(SIZE)); rows=$(word 2,$(SIZE)); \
x=$$((columns * column / $(TILES))); width=$$((columns * (column + 1) / $(TILES) - x)); \
y=$$((rows * row / $(TILES))); height=$$((rows * (row + 1) / $(TILES) - y)); \
left=$$((x < $(MARGIN) ? x : $(MARGIN))); top=$$((y < $(MARGIN) ? y : $(MARGIN))); \
right=$$((columns - x - width)); right=$$((right < $(MARGIN) ? right : $(MARGIN))); \
bottom=$$((rows - y - height)); bottom=$$((bottom < $(MARGIN) ? bottom : $(MARGIN)))
endef

all: hillshade.png $(PRODUCTS:%=%.tif)

crop/%.tif: $(DEM) | crop
	@$(call window,$*); gdal_translate $(TIFF) -srcwin $$((x - left)) $$((y - top)) \
	  $$((width + left + right)) $$((height + top + bottom)) $(DEM) $@

slope/%.tif: crop/%.tif | slope
	@gdaldem slope $< $@ $(TIFF) -compute_edges

aspect/%.tif: crop/%.tif | aspect
	@gdaldem aspect $< $@ $(TIFF) -compute_edges

hillshade/%.tif: crop/%.tif | hillshade
	@gdaldem hillshade $< $@ $(TIFF) -compute_edges -z 2

define gather
trim/$(1)/%.tif: $(1)/%.tif | trim/$(1)
	@$$(call window,$$*); gdal_translate $$(TIFF) -srcwin $$$$left $$$$top $$$$width $$$$height $$< $$@

$(1).vrt: $$(GRID:%=trim/$(1)/%.tif)
	@gdalbuildvrt -q $$@ $$^

$(1).tif: $(1).vrt
	@gdal_translate $$(TIFF) $$< $$@
endef
$(foreach product,$(PRODUCTS),$(eval $(call gather,$(product))))

hillshade.png: hillshade.tif
	@gdal_translate -q -of PNG -r average -outsize 1600 0 $< $@

crop $(PRODUCTS) $(PRODUCTS:%=trim/%):
	@mkdir -p $@

.PHONY: all
# Every intermediate file is a result too: kept, and never left half-written.
.SECONDARY:
.DELETE_ON_ERROR:
