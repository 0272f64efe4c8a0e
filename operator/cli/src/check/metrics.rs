//! Samples out of Prometheus' text format.

/// One scrape.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics(Vec<Sample>);

#[derive(Clone, Debug)]
struct Sample {
    name: String,
    labels: String,
    value: f64,
}

impl Metrics {
    /// Reads what it can; a line that is no sample is left out.
    pub(crate) fn parse(text: &str) -> Self {
        Self(text.lines().filter(|l| !l.starts_with('#')).filter_map(sample).collect())
    }

    /// The least sample of a family whose labels hold this text (`certificate="ca"`; empty: any).
    pub(crate) fn least(&self, name: &str, label: &str) -> Option<f64> {
        let samples = self.0.iter().filter(|s| s.name == name && s.labels.contains(label));
        samples.map(|s| s.value).min_by(f64::total_cmp)
    }

    /// Every family whose name ends so, summed.
    pub(crate) fn sum_of_suffix(&self, suffix: &str) -> f64 {
        self.0.iter().filter(|s| s.name.ends_with(suffix)).map(|s| s.value).sum()
    }
}

fn sample(line: &str) -> Option<Sample> {
    let (name, labels, rest) = if let Some((name, rest)) = line.split_once('{') {
        let (labels, value) = rest.rsplit_once('}')?;
        (name, labels, value)
    } else {
        let (name, value) = line.split_once(' ')?;
        (name, "", value)
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name: name.trim().to_owned(), labels: labels.to_owned(), value })
}

#[cfg(test)]
mod tests {
    use super::Metrics;

    #[test]
    fn samples_are_read_with_and_without_labels() {
        let m = Metrics::parse(
            "# TYPE a counter\na{x=\"1\",y=\"} 2\"} 3\na{x=\"2\"} 4 1700000000\nb 5\nnonsense\n",
        );
        assert_eq!(m.least("a", ""), Some(3.0));
        assert_eq!(m.least("a", "x=\"2\""), Some(4.0));
        assert_eq!(m.sum_of_suffix("a"), 7.0);
        assert_eq!(m.least("b", ""), Some(5.0));
        assert_eq!(m.least("c", ""), None);
    }
}
