"""Report: one HTML page that shows results, complete in itself."""

from saccade.bench.report.collect import Source as Source
from saccade.bench.report.collect import gather as gather
from saccade.bench.report.write import write as write
