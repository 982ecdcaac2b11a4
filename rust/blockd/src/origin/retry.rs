//! When to try again.

use std::time::{Duration, SystemTime};

use super::OriginOptions;

/// The pause before try number `attempt` (1 is the first retry): doubles each time, drawn from its upper half so that
/// readers which failed together do not come back together.
pub(super) fn pause(options: &OriginOptions, attempt: u32) -> Duration {
    let full = options.backoff.saturating_mul(1 << attempt.saturating_sub(1).min(16)).min(options.backoff_max);
    full.mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// `Retry-After`: seconds or an HTTP date (RFC 9110, 10.2.3).
pub(super) fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    match value.parse::<u64>() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => httpdate::parse_http_date(value).ok().map(|date| date.duration_since(now).unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_the_limit() {
        let options = OriginOptions::default();
        for (attempt, full) in [(1, 100), (2, 200), (3, 400), (6, 3200), (7, 5000), (u32::MAX, 5000)] {
            let pause = pause(&options, attempt).as_millis();
            assert!((full / 2..=full).contains(&pause), "attempt {attempt}: {pause} ms");
        }
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777); // Sun, 06 Nov 1994 08:49:37 GMT
        assert_eq!(retry_after(" 7 ", now), Some(Duration::from_secs(7)));
        assert_eq!(retry_after("Sun, 06 Nov 1994 08:49:57 GMT", now), Some(Duration::from_secs(20)));
        assert_eq!(retry_after("Sun, 06 Nov 1994 08:40:00 GMT", now), Some(Duration::ZERO));
        assert_eq!(retry_after("soon", now), None);
    }
}
