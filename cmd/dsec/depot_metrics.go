package main

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dsec-go/dsec/depot"
)

// depotMetrics shows the figures of dsec data. They begin anew when that does, as counters
// may; while none answers there are none.
type depotMetrics struct {
	depot *depot.Client
	list  []depotMetric
}

type depotMetric struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(depot.Stats) float64
}

func newDepotMetrics(c *depot.Client) *depotMetrics {
	m := &depotMetrics{depot: c}
	add := func(name, help string, kind prometheus.ValueType, value func(depot.Stats) float64) {
		m.list = append(m.list, depotMetric{prometheus.NewDesc(name, help, nil, nil), kind, value})
	}
	add("dsec_data_cached_bytes", "Data of layers that are on this node.", prometheus.GaugeValue, func(s depot.Stats) float64 { return float64(s.Cached) })
	add("dsec_data_fetched_bytes_total", "Bytes that came from the store.", prometheus.CounterValue, func(s depot.Stats) float64 { return float64(s.Fetched) })
	add("dsec_data_hits_total", "Chunks that a read found on this node.", prometheus.CounterValue, func(s depot.Stats) float64 { return float64(s.Hits) })
	add("dsec_data_misses_total", "Chunks that reads had fetched, those ahead of them too.", prometheus.CounterValue, func(s depot.Stats) float64 { return float64(s.Misses) })
	add("dsec_data_brought_total", "Pages of profiles that came before anybody asked.", prometheus.CounterValue, func(s depot.Stats) float64 { return float64(s.Brought) })
	add("dsec_data_unkept_total", "Chunks that had no room and were served all the same.", prometheus.CounterValue, func(s depot.Stats) float64 { return float64(s.Unkept) })
	add("dsec_data_evicted_total", "Blobs that were dropped to make room.", prometheus.CounterValue, func(s depot.Stats) float64 { return float64(s.Evicted) })
	add("dsec_data_corrupt_total", "Chunks that were not what their table says.", prometheus.CounterValue, func(s depot.Stats) float64 { return float64(s.Corrupt) })
	add("dsec_data_failed_total", "Reads that ended with an error.", prometheus.CounterValue, func(s depot.Stats) float64 { return float64(s.Failed) })
	add("dsec_data_waited_seconds_total", "Time that processes waited for the store.", prometheus.CounterValue, func(s depot.Stats) float64 {
		return time.Duration(s.Waited).Seconds()
	})
	return m
}

// Describe implements prometheus.Collector.
func (m *depotMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range m.list {
		ch <- d.desc
	}
}

// Collect implements prometheus.Collector.
func (m *depotMetrics) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	s, err := m.depot.Stats(ctx)
	if err != nil {
		return
	}
	for _, d := range m.list {
		ch <- prometheus.MustNewConstMetric(d.desc, d.kind, d.value(s))
	}
}
